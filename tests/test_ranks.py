"""Rank layout: every rank exactly once, for any fleet; everything else refused before anybody joins."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from weightcast.broadcaster.ranks import (
    InvalidRanks,
    Member,
    RankLayout,
    assign_ranks,
    check_cover,
    group_name,
)


def member(name: str, tp: int = 1, pp: int = 1, dp: int = 1) -> Member:
    return Member(name=name, instance=f"{name}/1", tp_size=tp, pp_size=pp, dp_size=dp)


@pytest.mark.parametrize(
    ("sizes", "offsets", "world"),
    [
        ({"a": 1}, {"a": 1}, 2),
        ({"a": 1, "b": 1, "c": 2}, {"a": 1, "b": 2, "c": 3}, 5),
        ({"c": 2, "a": 8, "b": 4}, {"a": 1, "b": 9, "c": 13}, 15),
    ],
)
def test_layouts(sizes: dict[str, int], offsets: dict[str, int], world: int) -> None:
    layout = assign_ranks(member(name, tp) for name, tp in sizes.items())
    assert (layout.offsets, layout.world_size) == (offsets, world)


fleets = st.dictionaries(st.text(min_size=1, max_size=6), st.integers(1, 16), min_size=1, max_size=20)


@given(fleets, st.randoms())
def test_every_rank_belongs_to_exactly_one_node_in_any_order_of_registration(sizes, random) -> None:
    members = [member(name, tp) for name, tp in sizes.items()]
    layout = assign_ranks(members)
    owners = [layout.node_of(rank) for rank in range(1, layout.world_size)]
    assert layout.node_of(0) == "" and layout.node_of(layout.world_size) == ""
    assert {name: owners.count(name) for name in sizes} == sizes
    random.shuffle(members)
    assert assign_ranks(members) == layout


@given(fleets, st.data())
def test_a_duplicate_or_a_gap_is_refused(sizes, data) -> None:
    layout = assign_ranks(member(name, tp) for name, tp in sizes.items())
    name = data.draw(st.sampled_from(sorted(sizes)))
    shift = data.draw(st.integers(-layout.world_size, layout.world_size).filter(bool))
    moved = RankLayout(
        offsets={**layout.offsets, name: layout.offsets[name] + shift},
        sizes=layout.sizes,
        world_size=layout.world_size,
    )
    with pytest.raises(InvalidRanks):
        check_cover(moved)


@pytest.mark.parametrize(
    ("members", "words"),
    [
        ([], "at least one node"),
        ([member("a"), member("a")], "two nodes are named 'a'"),
        ([member("a"), member("b", pp=2)], "node 'b' runs pp_size 2"),
        ([member("b", dp=4)], "node 'b' runs dp_size 4"),
        ([member("b", tp=0)], "tp_size 0"),
    ],
)
def test_fleets_that_cannot_form_a_group_are_refused(members: list[Member], words: str) -> None:
    with pytest.raises(InvalidRanks, match=words):
        assign_ranks(members)


def test_group_names_differ_by_job_life_and_epoch() -> None:
    names = {
        group_name(job=job, incarnation=life, epoch=epoch)
        for job in ("a", "b")
        for life in ("1", "2")
        for epoch in (1, 2)
    }
    assert len(names) == 8 and "weightcast-a-1-e2" in names
