#!/usr/bin/env python3
"""The one entry: argument parsing only. `python launch.py --recipe NAME [options] [path=value ...]`"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any, Optional

try:
    import typer
except ModuleNotFoundError:
    sys.exit(f"error: {sys.executable} has no package typer. Run `make setup`, then use .venv/bin/python launch.py")

from common.options import options_from
from data.prepare.request import PrepareRequest
from launcher.command_help import FullSummaries, GroupedHelp
from launcher.requests import ResumeRequest, TrainRequest
from planning.forecast_request import ForecastRequest
from planning.pilot_request import PilotRequest
from planning.request import PlanRequest
from report.evaluation.request import EvaluateRequest

SETTINGS = {"help_option_names": ["-h", "--help"], "max_content_width": 100}
BEFORE, TRAIN, WATCH, AFTERWARDS = "Before training", "Train", "While it runs", "Afterwards"
MACHINE = "This machine"

app = typer.Typer(
    cls=GroupedHelp,
    context_settings=SETTINGS,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    no_args_is_help=True,
)
GROUP: dict[str, Any] = {"cls": FullSummaries, "rich_markup_mode": None, "no_args_is_help": True}
data = typer.Typer(help="Training data.", **GROUP)
convert = typer.Typer(help="Hugging Face <-> NeMo.", **GROUP)
app.add_typer(data, name="data", rich_help_panel=BEFORE)
app.add_typer(convert, name="convert", rich_help_panel=AFTERWARDS)


def _print_version(wanted: bool) -> None:
    if wanted:
        from common.version import describe_version

        print(describe_version())
        raise typer.Exit


@app.callback()
def main(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Show the version.")
    ] = False,
) -> None:
    """Continue pretraining Qwen2.5-0.5B with NeMo 2.0."""


@app.command(name="train", rich_help_panel=TRAIN)
@options_from(TrainRequest, arguments=("overrides",))
def train(request: TrainRequest) -> None:
    """Train a recipe. The word `train` can be left out."""
    from launcher.launch import launch
    from watch.diagnose import explain_failure

    raise typer.Exit(launch(request.spec(), explain_failure))


@app.command(rich_help_panel=TRAIN)
@options_from(ResumeRequest, arguments=("run", "overrides"))
def resume(request: ResumeRequest) -> None:
    """Continue a run from its newest complete checkpoint, as it was started, with the changes given."""
    from launcher.launch import launch
    from watch.diagnose import explain_failure

    _console()
    with request.folder() as folder:
        raise typer.Exit(launch(request.spec(folder), explain_failure))


@app.command(rich_help_panel=BEFORE)
def fork(
    run: Annotated[str, typer.Argument(help="A run: NAME or runs/NAME.")],
    step: Annotated[str, typer.Argument(help="One of its checkpoints: N or step-N; `list RUN` shows them.")],
    name: Annotated[str, typer.Argument(help="The new run.")],
    overrides: Annotated[
        Optional[list[str]], typer.Argument(metavar="[PATH=VALUE]...", help="Numbers to change from there on.")
    ] = None,
    start: Annotated[bool, typer.Option("--start", help="Train it at once.")] = False,
) -> None:
    """Begin a new run with a checkpoint of another run, such as a final decay."""
    from launcher.fork_run import fork as make_fork
    from launcher.fork_run import started_fork
    from launcher.launch import launch
    from watch.diagnose import explain_failure

    _console()
    if not start:
        print(f"continue it with: {make_fork(run, step, name, overrides or ())}")
        return
    with started_fork(run, step, name, overrides or ()) as (folder, words):
        raise typer.Exit(launch(ResumeRequest(run=name, overrides=words).spec(folder), explain_failure))


@app.command(rich_help_panel=AFTERWARDS)
def soup(
    run: Annotated[str, typer.Argument(help="A run: NAME or runs/NAME.")],
    last: Annotated[
        Optional[int], typer.Option(metavar="K", help="Merge the newest K checkpoints; default: all there are.")
    ] = None,
    shape: Annotated[
        str, typer.Option("--shape", metavar="SHAPE", help="uniform, or 1-sqrt: the weights of such a decay.")
    ] = "1-sqrt",
    keep: Annotated[Optional[str], typer.Option(metavar="NEW", help="Keep the merge, as the run NEW.")] = None,
) -> None:
    """Merge checkpoints of a run, and validate the merge beside the newest one."""
    from rich.console import Console

    from launcher.merge_run import soup as merge

    _console()
    found = merge(run, last, shape, keep)
    Console().print(found.table())
    print(f"kept: {found.kept.path}" if found.kept else "not kept: --keep NEW keeps it as the run NEW")


@app.command(rich_help_panel=BEFORE)
@options_from(PlanRequest, arguments=("recipe", "overrides"))
def plan(request: PlanRequest) -> None:
    """Say what a run trains, whether it fits and how long it takes."""
    from planning.command import show_plan

    raise typer.Exit(show_plan(request))


@app.command(rich_help_panel=BEFORE)
@options_from(PilotRequest, arguments=("recipe", "overrides"))
def pilot(request: PilotRequest) -> None:
    """Try learning rates and replay shares in short trainings; recommend one each."""
    from planning.pilot_page import run_pilot

    run_pilot(request)


@app.command(rich_help_panel=BEFORE)
def paths(
    recipe: Annotated[str, typer.Argument(help="A name from `recipes`, or FILE.py:function.")],
    pattern: Annotated[str, typer.Argument(help="Show the paths that contain this text (lr_scheduler).")] = "",
) -> None:
    """List every path=value that a recipe takes."""
    from launcher.paths import list_paths

    for line in list_paths(recipe, pattern):
        print(line)


@app.command(rich_help_panel=BEFORE)
def recipes() -> None:
    """List the recipes."""
    from recipes import registry

    found = registry.recipes()
    width = max(map(len, found))
    for name, one in found.items():
        print(f"{name:<{width}}  {one.summary}")


@data.command()
@options_from(PrepareRequest, arguments=("inputs",))
def prepare(request: PrepareRequest) -> None:
    """Tokenise text into a corpus: train, validation and test .bin/.idx."""
    from data.prepare.prepare import prepare_corpus

    _console()
    prepare_corpus(request)


@data.command()
def adopt(
    prefix: Annotated[str, typer.Argument(help="A Megatron pair, without .bin and .idx.")],
    tokenizer: Annotated[str, typer.Option(help="The tokenizer that made the ids: a folder or a hub id.")],
    output: Annotated[Path, typer.Option(help="Folder of the corpus, such as corpora/mine.")],
    seed: Annotated[int, typer.Option(help="Another seed selects other validation and test documents.")] = 1234,
) -> None:
    """Make a corpus of an existing .bin/.idx, after checking it."""
    from data.prepare.adopt import adopt_corpus

    _console()
    adopt_corpus(prefix, tokenizer, output, seed)


@data.command()
def inspect(
    folder: Annotated[Path, typer.Argument(help="A prepared corpus (corpora/mine).")],
    samples: Annotated[int, typer.Option(help="Samples to decode.")] = 3,
) -> None:
    """Show counts, lengths and decoded samples of a corpus."""
    from data.inspect import inspect_corpus

    inspect_corpus(folder, samples=samples)


@data.command()
def documents(
    run: Annotated[str, typer.Argument(help="A run: NAME or runs/NAME.")],
    json_: Annotated[bool, typer.Option("--json", help="One JSON list on standard output.")] = False,
) -> None:
    """Count how often a run has read the documents of its corpora, by stage and attempt."""
    import json

    from common.rundir import find_run

    _console()
    folder = find_run(run)
    from data.documents_read import count_run, print_table  # takes seconds: Megatron

    rows = count_run(folder)
    print(json.dumps(rows, indent=1)) if json_ else print_table(rows)


@data.command()
def sample(output: Annotated[Path, typer.Option(help="Folder to write.")] = Path("corpora/sample")) -> None:
    """Build the sample corpora (prose and code) from Python's own texts."""
    from data.sample import build_sample

    _console()
    build_sample(output)


@convert.command(name="import")
def import_(
    source: Annotated[str, typer.Argument(help="The model: a folder, or a name on the hub (Qwen/Qwen2.5-0.5B).")],
    output: Annotated[Path, typer.Argument(help="Folder to write (models/qwen25-nemo).")],
    trust_pickle: Annotated[
        bool, typer.Option("--trust-pickle", help="Read pytorch_model.bin if there are no safetensors.")
    ] = False,
) -> None:
    """A Qwen2/Qwen2.5 model (HF folder or hub id) as a NeMo checkpoint."""
    from common.hub import check_model_name
    from convert.output_folder import check_output

    _console()
    if not (Path(source) / "weights").is_dir():
        check_model_name(source)
    check_output(output, 0)
    from convert.import_hf import import_hf

    print(import_hf(source, output, trust_pickle=trust_pickle))


@convert.command()
def export(
    source: Annotated[str, typer.Argument(help="A run (NAME or runs/NAME: its newest checkpoint), or a checkpoint.")],
    output: Annotated[Path, typer.Argument(help="The Hugging Face folder to make.")],
    like: Annotated[Optional[Path], typer.Option(help="Take config and tokenizer from this HF model.")] = None,
) -> None:
    """A checkpoint as a Hugging Face folder, compared with the checkpoint."""
    from convert.export_run import export_run
    from report.card import write_card

    _console()
    result = export_run(source, output, like)
    print(f"model card: {write_card(output)}")
    raise typer.Exit(0 if result.ok else 1)


@convert.command()
def gguf(
    folder: Annotated[Path, typer.Argument(help="An exported Hugging Face folder.")],
    output: Annotated[Optional[Path], typer.Argument(help="The file to make.", show_default="in the folder")] = None,
    kind: Annotated[str, typer.Option("--type", help="Weights: bf16, f16, f32 or q8_0.")] = "bf16",
) -> None:
    """An exported model as one GGUF file for llama.cpp, compared with the folder."""
    from convert.export_gguf import export_gguf

    _console()
    output = output or folder / f"{folder.resolve().name}-{kind}.gguf"
    print(export_gguf(folder, output, kind))


@convert.command()
def verify(
    left: Annotated[str, typer.Argument(help="A run, a checkpoint, a Hugging Face folder or a name on the hub.")],
    right: Annotated[str, typer.Argument(help="What to compare it with: one of the same.")],
    tokens: Annotated[int, typer.Option(help="Tokens to compare logits on.")] = 128,
) -> None:
    """Compare two models, parameters and logits; exit code 1 if they differ."""
    from common.hub import check_model_name
    from common.rundir import existing_run

    _console()
    for name in (left, right):
        if existing_run(name) is None:
            check_model_name(name)
    from convert.verify import verify as compare

    raise typer.Exit(0 if compare(left, right, num_tokens=tokens).ok else 1)


@app.command(rich_help_panel=WATCH)
def monitor(
    run: Annotated[
        Optional[str], typer.Argument(metavar="[RUN]", help="NAME or runs/NAME; default: the newest.")
    ] = None,
    interval: Annotated[float, typer.Option(metavar="SECONDS", help="Time between two looks.")] = 5.0,
    json: Annotated[bool, typer.Option("--json", help="One JSON object per look, for other programs.")] = False,
    once: Annotated[bool, typer.Option("--once", help="Look once, print, and end.")] = False,
    runs: Annotated[str, typer.Option(metavar="DIR", help="Folder of the run directories.")] = "runs",
) -> None:
    """Show how a run goes: progress, loss, rates, GPUs, ranks, warnings."""
    from common.rundir import find_run
    from watch.monitor import monitor as show
    from watch.records import newest_run

    show(find_run(run, Path(runs)) if run else newest_run(Path(runs)), interval_s=interval, as_json=json, once=once)


@app.command(rich_help_panel=WATCH)
@options_from(ForecastRequest, arguments=("run",))
def forecast(request: ForecastRequest) -> None:
    """Forecast the final validation loss of each domain from the first part of a run."""
    from planning.forecast_page import show_forecast

    show_forecast(request)


@app.command(name="list", rich_help_panel=WATCH)
def list_(
    run: Annotated[Optional[str], typer.Argument(metavar="[RUN]", help="Show the checkpoints of this run.")] = None,
    runs: Annotated[str, typer.Option(metavar="DIR", help="Folder of the run directories.")] = "runs",
    verify: Annotated[bool, typer.Option("--verify", help="Read every file of the checkpoints and compare.")] = False,
) -> None:
    """List the runs, newest first, or the checkpoints of one run."""
    from common.errors import EXIT_RUN
    from common.rundir import find_run
    from watch.monitor import checkpoints_table, output_console, runs_table

    if run is None:
        output_console().print(runs_table(Path(runs)))
        return
    table, all_good = checkpoints_table(find_run(run, Path(runs)), verify=verify)
    output_console().print(table)
    if not all_good:
        raise typer.Exit(EXIT_RUN)


@app.command(rich_help_panel=WATCH)
def diagnose(
    run: Annotated[str, typer.Argument(metavar="RUN", help="A run: NAME or runs/NAME.")],
    json: Annotated[bool, typer.Option("--json", help="One JSON object on standard output.")] = False,
) -> None:
    """Say why a run failed or hangs: cause, evidence, what to do, whether a retry can help."""
    from common.rundir import find_run
    from watch.diagnose import diagnose as look

    found = look(find_run(run))
    print(found.to_json() if json else found.to_text())


@app.command(rich_help_panel=AFTERWARDS)
def report(
    run: Annotated[str, typer.Argument(help="A run: NAME or runs/NAME.")],
    against: Annotated[Optional[list[str]], typer.Option(help="Another run to draw beside it.")] = None,
) -> None:
    """Write runs/NAME/report.html: what was learned, what was forgotten."""
    from report.report import write_report

    print(write_report(run, against or ()))


@app.command(rich_help_panel=AFTERWARDS)
def send(
    run: Annotated[str, typer.Argument(help="A run: NAME or runs/NAME.")],
    services: Annotated[str, typer.Argument(help="wandb, mlflow, or wandb+mlflow.")],
) -> None:
    """Send a run to W&B or MLflow: what they do not have yet. A run that trains is followed."""
    from common.rundir import find_run
    from report.send.command import send_run

    _console()
    raise typer.Exit(0 if send_run(find_run(run), services) else 1)


@app.command(rich_help_panel=AFTERWARDS)
def passport(
    run: Annotated[str, typer.Argument(help="A run: NAME or runs/NAME.")],
    strict: Annotated[bool, typer.Option("--strict", help="Exit 1 if an item failed or is unknown.")] = False,
) -> None:
    """Check a run against its own records, and write passport.json."""
    from rich.console import Console

    from report.passport import make_passport

    found = make_passport(run)
    found.save()
    Console().print(found.table())
    raise typer.Exit(found.exit_code(strict))


@app.command(rich_help_panel=AFTERWARDS)
@options_from(EvaluateRequest, arguments=("model",))
def evaluate(request: EvaluateRequest) -> None:
    """Score a model and its base on the same items: better, the same or worse. Needs no network."""
    from rich.console import Console

    from report.evaluation.comparison import RULE
    from report.evaluation.evaluate import evaluate as score

    _console()
    Console().print(score(request).table())
    print(RULE)


@app.command(rich_help_panel=AFTERWARDS)
def card(
    folder: Annotated[Path, typer.Argument(help="An exported Hugging Face folder.")],
    run: Annotated[Optional[str], typer.Option(help="Its run; default: the one that exported it.")] = None,
    license: Annotated[Optional[str], typer.Option(metavar="ID", help="Such as apache-2.0. Yours to choose.")] = None,
    language: Annotated[Optional[str], typer.Option(metavar="CODES", help="Such as en or en,zh.")] = None,
    base_model: Annotated[Optional[str], typer.Option(metavar="ID", help="The base's hub id.")] = None,
) -> None:
    """Write or renew the model card of an export: data, training, tables, passport."""
    from common.rundir import find_run
    from report.card import write_card

    given = {"license": license, "base_model": base_model}
    front: dict[str, str | list[str]] = {name: value for name, value in given.items() if value is not None}
    if language is not None:
        front["language"] = [code.strip() for code in language.split(",")]
    print(write_card(folder, find_run(run) if run else None, front))


@app.command(rich_help_panel=AFTERWARDS)
def push(
    folder: Annotated[Path, typer.Argument(help="An exported Hugging Face folder with its model card.")],
    repo: Annotated[str, typer.Argument(help="OWNER/NAME on the hub.")],
    send: Annotated[bool, typer.Option("--send", help="Upload; without it files and sizes are shown.")] = False,
    public: Annotated[bool, typer.Option("--public", help="Visible to everybody; else private.")] = False,
) -> None:
    """Show what of an export goes to the hub; --send uploads it as a private model."""
    from rich.console import Console

    from report.push import plan_upload
    from report.push import push as upload_files

    _console()
    upload = plan_upload(folder, repo, private=not public)
    Console().print(upload.table())
    for name in upload.left_out:
        print(f"not sent: {name}")
    print(upload_files(upload) if send else "nothing was sent; the same command with --send uploads these files")


@app.command(rich_help_panel=MACHINE)
def doctor(
    devices: Annotated[Optional[int], typer.Option(help="Ranks a run is to have; default: the GPUs here.")] = None,
    write: Annotated[Optional[Path], typer.Option(help="Write the smallest environment that works, for --env.")] = None,
    every: Annotated[
        bool, typer.Option("--every", help="Try every transport, not only down to the first that works.")
    ] = False,
    env: Annotated[Optional[str], typer.Option(metavar="SETS", help="Test exactly this environment set.")] = None,
    json: Annotated[bool, typer.Option("--json", help="One JSON object on standard output.")] = False,
    cluster: Annotated[
        Optional[Path], typer.Option(metavar="FILE", help="Check every node of a cluster, and their links.")
    ] = None,
    executor: Annotated[
        Optional[str], typer.Option(metavar="WHERE", help="With --cluster; default: the one that the file describes.")
    ] = None,
    nodes: Annotated[Optional[int], typer.Option(metavar="N", help="With --cluster; default: all.")] = None,
) -> None:
    """Check this machine, and how its ranks can communicate (under a minute)."""
    from doctor.nodes import check_options, run_on_nodes

    here = {"--write": write, "--every": every, "--json": json}
    check_options(cluster, with_cluster={"--executor": executor, "--nodes": nodes}, without=here)
    if cluster is not None:
        raise typer.Exit(run_on_nodes(cluster, executor, nodes, devices, env))
    from doctor.doctor import run_doctor

    raise typer.Exit(run_doctor(devices, write, env, every=every, as_json=json))


@app.command(name="env", rich_help_panel=MACHINE)
def env_(
    name: Annotated[
        Optional[str], typer.Argument(metavar="[SET]", help="A set, SET+SET+TIER, a FILE.env, or one VARIABLE.")
    ] = None,
    export: Annotated[bool, typer.Option("--export", help="Shell lines, for any other framework.")] = False,
    explain: Annotated[bool, typer.Option("--explain", help="What is set, by whom, since when, the verdict.")] = False,
    cluster: Annotated[Optional[Path], typer.Option(metavar="FILE", help="With the `env` of a cluster file.")] = None,
) -> None:
    """List the environment sets, explain one, or print one for a shell.

    In `train --env`, SET+SET+TIER replaces the recipe's own set; with a plus in front it adds to it: --env +prod.
    """
    import os

    from rich.console import Console

    from common.environment import show

    site = None
    if cluster is not None:
        from launcher.load_cluster import load_site

        name, site = load_site(name, cluster, elsewhere=not export)  # lines for a shell are for this machine
    if export:
        print(show.export_shell(name or "base", os.environ, site))
        if explain:  # apart from the lines for a shell
            Console(stderr=True).print(show.settings_table(name or "base", os.environ, site))
    elif name and show.is_variable(name):
        Console().print(show.variable_table(name, os.environ))
    else:
        Console().print(show.settings_table(name, os.environ, site) if name or explain else show.sets_table())


@app.command(rich_help_panel=AFTERWARDS)
def generate(
    model: Annotated[Path, typer.Argument(help="An exported Hugging Face folder.")],
    prompt: Annotated[str, typer.Argument(help='The text to continue ("Once upon a time").')],
    tokens: Annotated[int, typer.Option(help="Tokens to add.")] = 40,
) -> None:
    """Continue a prompt with an exported model, in plain transformers."""
    from convert.generate import generate as write

    print(write(model, prompt, tokens))


def _console() -> None:
    from common import logs

    logs.log_to_console()


def _run(argv: list[str]) -> int:
    """Parse and run; errors the user can mend are printed without a traceback.

    Returns:
        the exit code.
    """
    from common.errors import EXIT_INTERRUPTED, ProjectError
    from common.logs import hide_repeated_warnings

    hide_repeated_warnings()
    own = ("--help", "-h", "--version", "--install-completion", "--show-completion")
    if argv and argv[0].startswith("-") and argv[0] not in own:
        argv = ["train", *argv]
    try:
        app(argv, standalone_mode=True)
    except SystemExit as done:
        return int(done.code or 0)
    except ProjectError as error:
        print(f"error: {error.explain()}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        print("stopped", file=sys.stderr)
        return EXIT_INTERRUPTED
    return 0


if __name__ == "__main__":
    from common.processes import leave

    leave(_run(sys.argv[1:]))
