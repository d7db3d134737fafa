"""Bucket layouts as properties over arbitrary tensors, limits and groups."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from weightcast.proto.errors import InvalidLayout
from weightcast.proto.layout import ITEM_SIZES, Layout, TensorSpec, check_layout, check_specs, plan_buckets

shapes = st.lists(st.integers(0, 9), max_size=3).map(tuple)
dtypes = st.sampled_from(sorted(ITEM_SIZES))


@st.composite
def plans(draw: st.DrawFn) -> tuple[list[TensorSpec], int, list[frozenset[str]], Layout]:
    count = draw(st.integers(1, 25))
    specs = [TensorSpec(f"t{number}", draw(dtypes), draw(shapes)) for number in range(count)]
    limit = draw(st.integers(1, 4000))
    # Groups over names the refit may lack, as one declaration serves several models.
    names = draw(st.permutations([f"t{number}" for number in range(count + 3)]))
    sizes = draw(st.lists(st.integers(1, 4), max_size=4))
    groups, start = [], 0
    for size in sizes:
        groups.append(frozenset(names[start : start + size]))
        start += size
    groups = [group for group in groups if group]
    return specs, limit, groups, plan_buckets(specs, bucket_bytes=limit, together=groups)


@given(plans())
def test_every_tensor_is_in_exactly_one_bucket(
    plan: tuple[list[TensorSpec], int, list[frozenset[str]], Layout],
) -> None:
    specs, _, _, layout = plan
    assert sorted(index for bucket in layout.buckets for index in bucket) == list(range(len(specs)))
    assert layout.tensors == tuple(specs)
    assert layout.nbytes == sum(layout.bucket_nbytes(number) for number in range(len(layout.buckets)))
    check_layout(layout)


@given(plans())
def test_tensors_lie_back_to_back_and_aligned(
    plan: tuple[list[TensorSpec], int, list[frozenset[str]], Layout],
) -> None:
    _, _, _, layout = plan
    for number in range(len(layout.buckets)):
        end = 0
        for placed in layout.place(number):
            assert placed.offset == end
            assert placed.offset % ITEM_SIZES[placed.spec.dtype] == 0
            assert placed.spec == layout.tensors[placed.index]
            end += placed.spec.nbytes
        assert end == layout.bucket_nbytes(number)


@given(plans())
def test_groups_stay_together_and_only_they_or_one_tensor_pass_the_limit(
    plan: tuple[list[TensorSpec], int, list[frozenset[str]], Layout],
) -> None:
    specs, limit, groups, layout = plan
    bucket_of = {
        specs[index].name: number for number, bucket in enumerate(layout.buckets) for index in bucket
    }
    for group in groups:
        assert len({bucket_of[name] for name in group if name in bucket_of}) <= 1
    group_of = {name: group for group in groups for name in group}
    for number, bucket in enumerate(layout.buckets):
        if layout.bucket_nbytes(number) > limit:
            units = {
                group_of.get(specs[i].name, frozenset([specs[i].name])) for i in bucket if specs[i].nbytes
            }
            assert len(units) == 1


@given(plans())
def test_buckets_follow_the_order_of_arrival(
    plan: tuple[list[TensorSpec], int, list[frozenset[str]], Layout],
) -> None:
    specs, limit, groups, layout = plan
    loose = {number for number, spec in enumerate(specs) if not any(spec.name in group for group in groups)}
    arrivals = [sorted(index for index in bucket if index in loose) for bucket in layout.buckets]
    assert [index for bucket in arrivals for index in bucket] == sorted(loose)
    # A bucket is closed only when the next unit does not fit (without groups: one tensor).
    if not groups:
        for number in range(len(layout.buckets) - 1):
            first = min(layout.buckets[number + 1])
            assert layout.bucket_nbytes(number) + specs[first].nbytes > limit


@given(plans())
def test_fingerprint_is_of_the_layout_as_sent(
    plan: tuple[list[TensorSpec], int, list[frozenset[str]], Layout],
) -> None:
    layout = plan[3]
    travelled = msgspec.msgpack.decode(msgspec.msgpack.encode(layout), type=Layout)
    assert travelled == layout and travelled.fingerprint() == layout.fingerprint()
    first = layout.tensors[0]
    renamed = (TensorSpec(first.name + "x", first.dtype, first.shape), *layout.tensors[1:])
    assert Layout(renamed, layout.buckets).fingerprint() != layout.fingerprint()


@given(plans(), st.data())
def test_a_damaged_layout_is_refused(
    plan: tuple[list[TensorSpec], int, list[frozenset[str]], Layout], data: st.DataObject
) -> None:
    layout = plan[3]
    number = data.draw(st.integers(0, len(layout.buckets) - 1))
    bucket = layout.buckets[number]
    damaged = data.draw(
        st.sampled_from([(*bucket, bucket[0]), bucket[1:], (*bucket, len(layout.tensors)), (*bucket, -1)])
    )
    buckets = (*layout.buckets[:number], damaged, *layout.buckets[number + 1 :])
    with pytest.raises(InvalidLayout):
        check_layout(Layout(layout.tensors, buckets))


def test_misaligned_order_is_refused() -> None:
    tensors = (TensorSpec("a", "uint8", (3,)), TensorSpec("b", "float32", (2,)))
    with pytest.raises(InvalidLayout, match=r"'b' \(float32\) at byte 3"):
        check_layout(Layout(tensors, ((0, 1),)))
    assert plan_buckets(tensors, bucket_bytes=100).buckets == ((1, 0),)


def test_problems_are_listed_all_at_once() -> None:
    specs = [TensorSpec("a", "int4", (1,)), TensorSpec("a", "int8", (-1,)), TensorSpec("", "int8", ())]
    with pytest.raises(InvalidLayout) as caught:
        check_specs(specs)
    for part in ("'a' has dtype 'int4'", "'a' is named twice", "negative extent", "empty name"):
        assert part in str(caught.value)
    with pytest.raises(InvalidLayout, match="names no tensors"):
        plan_buckets([], bucket_bytes=1)
    with pytest.raises(InvalidLayout, match="bucket_bytes is 0"):
        plan_buckets(specs, bucket_bytes=0)
    good = [TensorSpec("a", "int8", (1,))]
    with pytest.raises(InvalidLayout, match="'a' is declared in two groups"):
        plan_buckets(good, bucket_bytes=1, together=[frozenset("a"), frozenset("ab")])


def test_scalars_and_empty_tensors_have_their_bytes() -> None:
    assert TensorSpec("s", "float64", ()).nbytes == 8
    assert TensorSpec("e", "float64", (4, 0)).nbytes == 0
    assert plan_buckets([TensorSpec("e", "int8", (0,))], bucket_bytes=1).buckets == ((0,),)
