"""Socket rules: how every ZeroMQ socket of weightcast is opened, and how frames become messages.

One place sets limits and options, so that no socket is without them: bounded queues, no lingering at
close, no frame over `MAX_FRAME_BYTES`, strict decoding of tagged structs. Nothing here, or on any
socket of ours, is pickle.
"""

from __future__ import annotations

from typing import Any, TypeVar

import msgspec
import zmq

from .errors import AddressInUse, ProtocolError

#: Largest control frame accepted. A layout of 200,000 tensors takes about 16 MB.
MAX_FRAME_BYTES = 64 * 1024 * 1024
#: Messages queued per peer before a sender is told so.
HIGH_WATER_MARK = 4096

T = TypeVar("T")


def configure(socket: Any) -> None:
    """Apply the rules that all our sockets share. ``socket`` is a plain or an asyncio ZeroMQ socket."""
    socket.setsockopt(zmq.LINGER, 0)
    socket.setsockopt(zmq.MAXMSGSIZE, MAX_FRAME_BYTES)
    socket.setsockopt(zmq.SNDHWM, HIGH_WATER_MARK)
    socket.setsockopt(zmq.RCVHWM, HIGH_WATER_MARK)
    socket.setsockopt(zmq.IPV6, 1)
    if socket.type == zmq.ROUTER:
        # Sending to a peer that is gone raises instead of vanishing, and a peer that reconnects under
        # its name takes over from its own dead connection.
        socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        socket.setsockopt(zmq.ROUTER_HANDOVER, 1)
    else:
        socket.setsockopt(zmq.RECONNECT_IVL, 100)
        socket.setsockopt(zmq.RECONNECT_IVL_MAX, 2000)


def bind(socket: Any, endpoint: str) -> str:
    """Bind and return the endpoint really bound (port 0 or ``*`` becomes a number).

    Raises:
        AddressInUse: naming the endpoint, if it is taken or not ours to bind.
    """
    try:
        socket.bind(endpoint)
    except zmq.ZMQError as error:
        raise AddressInUse(
            f"cannot listen on {endpoint}: {error}. Another process may hold it; "
            "choose another address, or port 0 for a free one"
        ) from error
    return str(socket.getsockopt_string(zmq.LAST_ENDPOINT))


def encode(message: msgspec.Struct) -> bytes:
    """One message as one msgpack frame.

    Raises:
        ProtocolError: if the frame would be larger than any peer accepts.
    """
    frame = msgspec.msgpack.encode(message)
    if len(frame) > MAX_FRAME_BYTES:
        raise ProtocolError(
            f"a {type(message).__name__} of {len(frame)} bytes is over the limit of {MAX_FRAME_BYTES}"
        )
    return frame


def decode(frame: bytes | memoryview, decoder: msgspec.msgpack.Decoder[T]) -> T:
    """One frame as one message of the decoder's union.

    Raises:
        ProtocolError: for a frame that is too large, is not msgpack, or is no such message.
    """
    size = memoryview(frame).nbytes
    if size > MAX_FRAME_BYTES:
        raise ProtocolError(f"a frame of {size} bytes is over the limit of {MAX_FRAME_BYTES}")
    try:
        return decoder.decode(frame)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ProtocolError(f"a frame of {size} bytes is no message of ours: {error}") from error
