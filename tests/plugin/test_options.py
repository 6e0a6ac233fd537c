"""The plugin's options as a user meets them: what they choose, what they print, and what is wrong with them."""

import pytest

from shardmark.api.registry import family
from shardmark.api.requirements import requires_compiler
from tests.support.links import makes_links
from tests.support.project import row_of, run_project

pytest_plugins = ["pytester", "tests.support.project"]


def test_only_some_implementations_and_a_users_own_where_the_reference_is(project: pytest.Pytester) -> None:
    collect = ("--collect-only", "-q", "-k", "some or another")
    names = [
        "test_sleeps.py::test_some[plain]",
        "test_sleeps.py::test_some[slow]",
        "test_sleeps.py::test_another[slow]",
    ]
    assert [line for line in project.runpytest_inprocess(*collect).outlines if "::" in line] == names
    chosen = project.runpytest_inprocess(*collect, "--impl", "sleep=greedy").outlines  # the family is registered by now
    assert [line for line in chosen if "::" in line and "greedy" in line] == ["test_sleeps.py::test_some[greedy]"]


def test_impl_runs_that_family_alone(project: pytest.Pytester) -> None:
    project.makepyfile(own="from torch.nn.functional import scaled_dot_product_attention as mine")
    project.makepyfile(
        test_attention="""
        import pytest
        @pytest.mark.family("attention")
        def test_it(implementation): print("ran", implementation.name)
        @pytest.mark.family("collectives")
        def test_other(implementation): pass
        def test_no_family(): pass
        """
    )
    result, _ = run_project(
        project, "--scale=smoke", "--impl", "attention=own.py:mine", "--impl", "attention=sdpa", "-s"
    )
    result.assert_outcomes(passed=2)  # and the rest is deselected
    result.stdout.fnmatch_lines(["*ran mine*", "*ran sdpa*"])


def test_impl_reaches_the_ranks(project: pytest.Pytester) -> None:
    project.makepyfile(
        own="""
        from impl.data_parallel import NaiveDataParallel

        class Mine(NaiveDataParallel):
            pass
        """,
        test_ranks="""
        import pytest
        from torch import nn

        def wrap(implementation):
            return type(implementation.adapted(nn.Linear(2, 2))).__name__

        @pytest.mark.family("data_parallel")
        def test_it(implementation, world):
            assert world.run(wrap, implementation) == ["Mine"] * world.size
        """,
    )
    result, _ = run_project(project, "--impl=data_parallel=own.py:Mine", "--ranks=2", "test_ranks.py")
    result.assert_outcomes(passed=1)


def test_a_test_may_choose_its_own_worlds(project: pytest.Pytester) -> None:
    project.makepyfile(
        test_own="""
        import pytest

        @pytest.mark.parametrize("world", [2], indirect=True)
        def test_size(world):
            assert world.size == 2

        @pytest.mark.family("nonesuch")
        def test_family(implementation): pass
        """
    )
    result, _ = run_project(project, "--ranks=1", "test_own.py", "-k", "size", "--continue-on-collection-errors")
    result.assert_outcomes(errors=1)
    result.stdout.fnmatch_lines(["test_own.py::test_family: no family 'nonesuch'; the families are *"])


def test_ranks_and_cases_parametrize_tests(project: pytest.Pytester) -> None:
    project.makepyfile(
        test_ranks="""
        import torch.distributed as dist
        def test_size(world):
            assert world.run(dist.get_world_size) == [world.size] * world.size
        """
    )
    result, _ = run_project(project, "--ranks=1,3,1", "-v", "test_ranks.py")
    result.assert_outcomes(passed=2)
    result.stdout.fnmatch_lines(["*test_size[[]1ranks[]] PASSED*", "*test_size[[]3ranks[]] PASSED*"])
    result, _ = run_project(project, "--scale=laptop", "--collect-only", "-q", "test_sleeps.py")
    result.stdout.fnmatch_lines(["*test_nap[[]plain-0.005s[]]", "*test_nap[[]plain-0.01s[]]"])


@pytest.fixture(scope="session")
def _compiler_is_imported() -> None:
    """`pytester` forgets modules that are imported in its runs, and torch's compiler can be imported only once."""
    requires_compiler("cpu")


@pytest.mark.usefixtures("_compiler_is_imported")
def test_the_listing_is_printed_and_nothing_runs(project: pytest.Pytester) -> None:
    result, output = run_project(project, "--implementations", "--device=cpu")
    assert result.ret == 0 and not output
    kernel = family("attention").implementations["flash_triton"]
    reason = kernel.unavailable_reason("cpu")
    runs = "runs here, and is not measured: on CPU it runs in Triton's interpreter, "
    result.stdout.fnmatch_lines(
        [
            "torch *, device cpu",
            "attention (reference: eager)",
            f"  flash_triton * {f'does not run here: {reason}' if reason else f'{runs}*'}",
            "  sdpa * runs here",
            "  flex * does not run here: PyTorch's FlexAttention has no backward pass on CPU",
        ]
    )
    result.stdout.no_fnmatch_line("*passed*")


@makes_links
def test_rows_and_tables_tell_of_the_link_between_the_ranks(project: pytest.Pytester) -> None:
    project.makepyfile(
        test_hosts="""
        import os

        def host():
            return os.readlink("/proc/self/ns/net")

        def test_two(link, worlds):
            assert link.rate == "1gbit" and len(set(worlds(2).run(host))) == 2
        """
    )
    result, output = run_project(project, "--scale=smoke", "-v", "--link=1gbit", "-k", "first_steps and plain or two")
    result.assert_outcomes(passed=2)
    assert row_of(output, "plain")["link"] == "1gbit"
    result.stdout.fnmatch_lines(
        ["link: the ranks live on two hosts, joined at 1gbit", "*nap? (two hosts, joined at 1gbit)*"]
    )
    result, output = run_project(project, "--scale=smoke", "-k", "first_steps and plain or two", "-rs")
    result.assert_outcomes(passed=1, skipped=1)
    assert row_of(output, "plain")["link"] is None
    result.stdout.fnmatch_lines(["SKIPPED * needs a link between the ranks: --link 1gbit, as root"])
    result.stdout.no_fnmatch_line("*joined at*")


def test_a_link_does_not_go_with_torchruns_ranks(project: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("TORCHELASTIC_RUN_ID", "RANK", "WORLD_SIZE"):
        monkeypatch.setenv(name, "0")
    result = project.runpytest_inprocess("--device=cpu", "--link=1gbit")
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines(
        ["ERROR: --link 1gbit does not go with torchrun, whose ranks are where it started them"]
    )


def test_meshes_parametrize_tests(project: pytest.Pytester) -> None:
    """A test's own meshes by default, those of --mesh if given, and with --ranks its own of such a size."""
    project.makepyfile(
        test_meshes="""
        import pytest

        @pytest.mark.meshes("dp=2", "dp=2,tp=2")
        def test_it(mesh): print("on", mesh, mesh.size)
        """
    )

    def ran(*options: str) -> list[str]:
        result, _ = run_project(project, "-s", *options, "test_meshes.py")
        return [line.partition("on ")[2] for line in result.outlines if "on dp" in line]

    assert ran() == ["dp2 2", "dp2_tp2 4"]
    assert ran("--ranks=4") == ["dp2_tp2 4"]
    assert ran("--mesh=dp=3", "--mesh=dp=1,cp=2") == ["dp3 3", "dp1_cp2 2"]


def test_a_bad_mesh_is_a_usage_error(project: pytest.Pytester) -> None:
    result = project.runpytest("--mesh=dp=2,zp=2")
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines(
        ["*--mesh dp=2,zp=2: it has axes among pp, dp, shard, cp, tp, ep, such as *, not 'zp=2'"]
    )
