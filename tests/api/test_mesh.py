"""Meshes: names and sizes of their axes, and the part of a batch that each rank sees."""

import re

import pytest
import torch

from shardmark.api import AXES, Mesh, Share, data_axes


def test_the_last_axis_has_neighbours() -> None:
    mesh = Mesh.parse("dp=2, tp=3")
    assert mesh.size == 6 and str(mesh) == "dp2_tp3" and mesh.sizes == {"dp": 2, "tp": 3}
    assert [mesh.coordinates(rank) for rank in (0, 1, 3, 5)] == [
        {"dp": 0, "tp": 0},
        {"dp": 0, "tp": 1},
        {"dp": 1, "tp": 0},
        {"dp": 1, "tp": 2},
    ]


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("dq=2", "it has axes among pp, dp, shard, cp, tp, ep, such as dp=2,tp=2, not 'dq=2'"),
        ("", "it has axes among"),
        ("dp", "dp is a number of ranks from 1 on, not ''"),
        ("dp=0", "dp is a number of ranks from 1 on, not '0'"),
        ("dp=-2", "dp is a number of ranks from 1 on, not '-2'"),
        ("dp=2.0", "not '2.0'"),
        ("dp=2,dp=2", "it has dp twice"),
        (
            "tp=2,ep=2",
            "ep lies over the innermost of dp, shard and cp: it has as many ranks as some of them together, not",
        ),
        ("dp=2,shard=3,ep=2", "ep lies over the innermost of dp, shard: it has as many ranks as some of them together"),
        ("ep=2", "ep lies over"),
    ],
)
def test_a_text_that_is_no_mesh_is_told_in_one_line(text: str, says: str) -> None:
    with pytest.raises(ValueError, match=re.escape(says)) as error:
        Mesh.parse(text)
    assert "\n" not in str(error.value)


def test_experts_lie_over_the_innermost_axes() -> None:
    assert Mesh.parse("dp=2,shard=2,ep=2").below_experts() == ("shard",)
    assert Mesh.parse("dp=2,tp=2,shard=2,ep=4").below_experts() == ("dp", "shard")
    assert Mesh.parse("dp=2,shard=2,ep=2").size == 4


def test_ranks_see_rows_slices_or_the_same() -> None:
    """Together, ranks with tokens of their own see each token once, though rows do not divide."""
    mesh = Mesh.parse("dp=2,shard=2,cp=2,tp=2")
    batch = (torch.arange(5 * 6).view(5, 6), torch.arange(5 * 6 * 2).view(5, 6, 2))
    shares = [mesh.share(batch, rank) for rank in range(mesh.size)]
    for rank in range(0, mesh.size, 2):  # neighbours are along tp
        assert all(torch.equal(a, b) for a, b in zip(shares[rank], shares[rank + 1], strict=True))
    seen = torch.cat([tokens.flatten() for tokens, _ in shares[::2]])
    assert sorted(seen.tolist()) == list(range(30))
    assert shares[2][0].tolist() == [[3, 4, 5], [9, 10, 11]]  # the second slice of the first two rows
    assert all(len(tokens) >= 1 for tokens, _ in shares)


def test_the_axes_with_tokens_of_their_own_are_those_that_do_not_see_the_same() -> None:
    assert data_axes(list(AXES)) == ("dp", "shard", "cp")
    mesh = Mesh.parse("pp=2,cp=2,dp=2")
    assert mesh.data_axes == ("cp", "dp") and mesh.along(Share.ROWS) == ("dp",) and mesh.along(Share.SAME) == ("pp",)
