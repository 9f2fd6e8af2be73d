"""Help fits, every verb has what the contract says, and nothing is imported before it is needed."""

from __future__ import annotations

import resource
import subprocess
import sys

import pytest

from limosa.cli.main import VERBS


def test_what_is_said_of_containers(inside):
    assert "or a container (podman:train)" in " ".join(inside("--help").stdout.split())
    cdi = inside("cdi", "--help").stdout
    assert "  limosa cdi\n\n  podman run " in cdi
    assert "/usr/local/lib/limosa, is filled with --output - as well" in " ".join(cdi.split())
    assert "it is removed, and what podman has logged" in " ".join(inside("checkpoint", "--help").stdout.split())


WITH_DRY_RUN = ("move", "suspend", "resume", "toggle", "checkpoint", "restore", "recover")


@pytest.mark.parametrize("columns", ["80", "200"])
@pytest.mark.parametrize("verb", ["", *VERBS])
def test_help_fits_80_columns(inside, verb, columns):
    ran = inside(*verb.split(), "--help", env={"COLUMNS": columns})
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.startswith("Usage: limosa")
    too_long = [line for line in ran.stdout.splitlines() if len(line) > 80]
    assert not too_long


@pytest.mark.parametrize(
    ("verb", "usage"),
    [
        ("move", "[OPTIONS] [JOB]..."),
        ("stop", "[OPTIONS] JOB"),
        ("rm", "[OPTIONS] DIR..."),
        ("run", "[OPTIONS] COMMAND..."),
        ("plan", "[OPTIONS] VERB [...]"),
        ("arena", "[OPTIONS] [SIZE]"),
        ("images", "[OPTIONS] [DIR]"),
        ("softgpu", "[OPTIONS] [COMMAND]..."),
    ],
)
def test_the_usage_says_what_must_be_given_and_what_may_be_repeated(inside, verb, usage):
    assert inside(verb, "--help").stdout.splitlines()[0] == f"Usage: limosa {verb} {usage}"


@pytest.mark.parametrize("verb", VERBS)
def test_every_verb_prints_json_and_can_be_quiet(inside, verb):
    text = inside(verb, "-h").stdout
    for option in ("-o, --format", "-q, --quiet", "-v, --verbose"):
        assert option in text, f"limosa {verb} has no {option}"


@pytest.mark.parametrize("verb", WITH_DRY_RUN)
def test_verbs_that_change_something_have_a_dry_run(inside, verb):
    assert "--dry-run" in inside(verb, "--help").stdout


@pytest.mark.parametrize("verb", WITH_DRY_RUN)
def test_the_help_of_a_plan_has_examples_that_touch_nothing(inside, verb):
    plan, own = (inside(*words, "--help").stdout.splitlines() for words in (("plan", verb), (verb,)))
    assert plan[2] == f"  Say what limosa {verb} would do, and touch nothing."
    assert not [line for line in plan if line.startswith(f"  limosa {verb} ")]
    examples = [line.replace("limosa", "limosa plan", 1) for line in own if line.startswith(f"  limosa {verb} ")]
    assert [line for line in plan if line.startswith(f"  limosa plan {verb} ")] == examples
    assert max(map(len, plan)) <= 80


def test_the_list_of_verbs_tells_what_each_verb_tells(cli):
    listed = cli("--help").stdout
    for verb, (_, short) in VERBS.items():
        assert f"  {verb} " in listed
        assert short in listed


def test_list_is_ps(cli):
    assert cli("list", "--help").stdout.replace("limosa list", "limosa ps") == cli("ps", "--help").stdout


def test_version(cli):
    import limosa

    assert cli("--version").stdout == f"limosa {limosa.__version__}\n"


def test_the_version_is_told_before_the_parser_is_loaded(environment):
    code = "sys.argv = ['limosa', '--version']\nfrom limosa.__main__ import main\n"
    loaded = _imported(environment, code + "try:\n    main()\nexcept SystemExit:\n    pass")
    assert not {"limosa.cli", "click", "json", "inspect"} & loaded


def test_the_version_is_the_packages():
    import re
    from pathlib import Path

    import limosa

    settings = (Path(__file__).parents[2] / "pyproject.toml").read_text()
    assert re.search(r'^version = "(.*)"', settings, re.MULTILINE)[1] == limosa.__version__


def _imported(environment, code):
    ran = subprocess.run(
        [sys.executable, "-c", f"import sys\n{code}\nprint(*sys.modules, file=sys.stderr)"],
        env=environment,
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    return set(ran.stderr.split())


def test_help_imports_no_verb_and_nothing_heavy(environment):
    code = "from limosa.cli.main import entry\ntry:\n    entry(['--help'])\nexcept SystemExit:\n    pass"
    loaded = _imported(environment, code)
    heavy = {"rich", "msgspec", "cuda", "pynvml", "psutil", "blake3", "numpy", "limosa.operation", "limosa.gpu"}
    assert not heavy & loaded
    assert not {module for module, _ in VERBS.values()} & loaded


def test_a_verb_loads_what_it_needs(environment):
    """Pydantic, and reading the package's own metadata, were once a third of what each verb began with."""
    code = (
        "from limosa.cli.main import entry\n"
        "try:\n    entry(['checkpoint', '999999999', '--output', '/tmp/none', '-o', 'json'])\n"
        "except SystemExit:\n    pass"
    )
    loaded = _imported(environment, code)
    assert "limosa.operation.checkpoint" in loaded
    assert not {"pydantic", "importlib.metadata", "email", "rich", "cuda", "psutil", "numpy"} & loaded


def test_import_limosa_loads_none_of_it(environment):
    loaded = {m for m in _imported(environment, "import limosa") if m.startswith("limosa")}
    assert loaded == {"limosa", "limosa.version"}


def test_help_is_there_within_120_ms(environment):
    # Processor time, the least of some runs: what it costs, not how busy the machine is. Where neighbours make the
    # processor itself slow, Python takes longer as well.
    def least(*arguments):
        times = []
        for _ in range(5):
            before = resource.getrusage(resource.RUSAGE_CHILDREN)
            subprocess.run([sys.executable, *arguments], env=environment, capture_output=True, check=True)
            after = resource.getrusage(resource.RUSAGE_CHILDREN)
            times.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
        return min(times)

    help_, bare = least("-m", "limosa", "--help"), least("-c", "pass")
    assert help_ < max(0.12, 7 * bare), (help_, bare)
