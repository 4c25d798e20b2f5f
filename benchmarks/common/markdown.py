"""The page `docs/results.md`, made of the stored results; nothing is measured here.

    python -m benchmarks --markdown > docs/results.md

Each section belongs to files of `benchmarks/results`, and names the command that wrote them.  A file without a section is an
error, so that no result is stored and forgotten.  `tests/test_docs.py` compares the committed page with what this prints.
"""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks import (
    conv_gradients,
    cuda_codegen,
    first_step,
    floor,
    forecast_facts,
    gap,
    gpu_peaks,
    inputs,
    max_speed,
    planning_time,
    predicted_time,
    promise,
    scale,
    slices,
    step_time,
    together,
    workspaces,
)
from benchmarks.common import frontier
from benchmarks.common.harness import MIB
from benchmarks.common.result_rows import Row
from benchmarks.common.timing import RatioInterval
from benchmarks.literature import tables as literature_tables
from benchmarks.literature.rows import rows_of
from benchmarks.literature.sources import SOURCES
from benchmarks.zoo import summary as zoo_summary
from benchmarks.zoo.rows import ZooRow

RESULTS = Path(__file__).parent.parent / "results"
NOT_TABLES = frozenset(
    {"digest.json", "digest_problems.json.gz", "gpu_h200", "memory_over_a_step_cpu.json", "promise_rivals_cpu.json"}
)
"""Others: compared by `benchmarks.digest`, drawn by `benchmarks.picture`, merged into another file, a folder of contests."""

README_MODELS = ("gpt", "chain256", "bert", "resnet", "llama", "vit", "chain1024")
README_SLICED = ("head", "long")
"""Of `slices`, beside them."""

Table = tuple[Sequence[str], Sequence[Sequence[str]]]
Rows = list[dict[str, Any]]

INTRODUCTION = """\
# Results

<!-- Written by `python -m benchmarks --markdown > docs/results.md` from benchmarks/results. Do not edit. -->

Figures of an H200 come first: peaks by `max_memory_allocated`, times by CUDA events. All other measurements are from a CPU: C++
code of Inductor, fixed shapes, float32 where nothing else is said.
Peaks are exact: they count every call of the allocator in the second training step (forward and backward, no optimizer).
Each section names the command that prints it; `--json` writes what is stored in `benchmarks/results/`.
Sizes are MiB unless a unit is given.
Peaks and times under a budget are of plans with `inputs="constant"`, from before that setting, where no other is named; the
default adds [this](#what-it-costs-to-read-only-the-inputs-that-plain-torchcompile-reads)."""


@dataclass(frozen=True)
class Section:
    """One result: `file` of the results folder, the command that wrote it, and how its rows become tables."""

    title: str
    file: str
    command: str
    text: str
    tables: Callable[[Rows], list[Table]]
    summary: Callable[[Rows], str] = lambda rows: ""


def page() -> str:
    """The whole page.

    Raises:
        ValueError: A stored result has no section.
    """
    unknown = {path.name for path in RESULTS.iterdir()} - NOT_TABLES - {s.file for s in SECTIONS} - {ESTIMATES}
    if unknown:
        raise ValueError(f"results without a section in benchmarks/common/markdown.py: {', '.join(sorted(unknown))}")
    stored = [section for section in SECTIONS if (RESULTS / section.file).exists()]
    return "\n\n".join([INTRODUCTION, _contests(), *map(_section, stored), _estimates()]) + "\n"


def readme_table() -> str:
    """The table of the README: some models of `promise` and of `slices`, one line each; "-" where nothing was measured."""
    early = {row["model"]: row["early_bytes"] / MIB for row in _stored("floor_cpu.json")["rows"]}
    document = _stored("promise_cpu.json")
    everything = [Row(**fields) for fields in document["rows"]]
    titles = (
        "model",
        "torch.compile",
        "lowest with torch's own setting",
        "budget 0.6",
        "budget 0.4",
        "`min`",
        "of it gradients",
        '`min`, `gradients="early"`',
        '`min`, `slices="auto"`',
    )
    cells = []
    for name in README_MODELS:
        rows = [row for row in everything if row.model == name]
        plain = next(row for row in rows if row.kind == "plain")
        ours = {row.setting: row for row in rows if row.kind == "remat"}
        cells.append(
            [
                name,
                promise.peak_text(plain),
                promise.mib(promise.torchs_lowest(name, rows)),
                *(promise.peak_text(ours[setting]) for setting in ("0.6", "0.4", "min")),
                f"{(plain.gradient_bytes or 0) / MIB:.1f}",
                f"{early[name]:.1f}" if name in early else "-",
                "-",
            ]
        )
    for row in _stored("slices_cpu.json")["rows"]:
        if row["case"] in README_SLICED:
            peaks = {kind: f"{row[f'{kind}_peak_bytes'] / MIB:.1f}" for kind in ("plain", "whole", "sliced")}
            cells.append([row["case"], peaks["plain"], "-", "-", "-", peaks["whole"], "-", "-", peaks["sliced"]])
    return markdown_table(titles, cells)


def markdown_table(titles: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Columns of numbers are right-aligned."""
    is_text = [all(not row[i][:1].isdigit() and row[i][:1] not in "+-" for row in rows) for i in range(len(titles))]
    rule = "|" + "|".join(":--" if left else "--:" for left in is_text) + "|"
    head, *lines = ["| " + " | ".join(map(_escaped, row)) + " |" for row in (titles, *rows)]
    return "\n".join([head, rule, *lines])


def _escaped(cell: str) -> str:
    return cell.replace("|", "\\|").replace("*", "\\*")


def _section(section: Section) -> str:
    document = _stored(section.file)
    rows: Rows = document["rows"]
    parts = [
        f"## {section.title}",
        section.text,
        f"`{section.command}` ({_place(document['header'])}; `{section.file}`)",
    ]
    parts += [markdown_table(*table) for table in section.tables(rows)]
    if text := section.summary(rows):
        parts.append(f"```text\n{text}\n```")
    return "\n\n".join(parts)


def _stored(file: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((RESULTS / file).read_text())
    return found


def _place(header: Mapping[str, str]) -> str:
    device = header["device"].partition("(")[2].rstrip(")") or header["device"]
    threads = f"{header['threads']} thread" + "s" * (header["threads"] != "1")
    return f"{device}, {threads}, torch {header['torch']}, {header['date'].partition(' ')[0]}"


CONTESTS = "gpu_h200"
CONTEST_COMMAND = (
    "python -m benchmarks.gpu --model gpt --model llama --model resnet50 --workers 15 --minutes 5.45 --share 0.25 --torch 0.5 "
    "--torch 0.1 --option device=benchmarks/results/gpu_h200/device.json --option oom_retry=0 --out DIR"
)


def _contests() -> str:
    """Memory against time on a GPU: what `benchmarks.gpu` stored, a table, a summary and a picture for each model."""
    documents = [json.loads(path.read_text()) for path in sorted((RESULTS / CONTESTS).glob("*.json"))]
    found = [document for document in documents if "points" in document]
    parts = [
        "## Memory against time on a GPU",
        """\
Models of one large GPU in bfloat16, at a quarter of their batch, trained by plain `torch.compile`, with every block under
`torch.utils.checkpoint`, under torch's `activation_memory_budget`, and by us: at half and 0.3 of plain's peak, at each rival's
peak, at `max` and `min`. Peaks are above the level before the step. `extra` is the time beyond plain's, measured, predicted, and
the proven least of it; gradients are compared with plain's. At each rival's peak ours is faster. Predicted times are a sixth to a
fifth short: of GPT's 14 ms, 6 are no kernel's (all kernels of plain's step take 80 ms, `gpt.kernels.json`), and its linear layers
run at 757 TFLOP/s in a step where the device file, fitted to smaller products that run for themselves, says 845.""",
        f"`{CONTEST_COMMAND}` ({_place(found[0]['header'])}; `{CONTESTS}/`)",
    ]
    for document in found:
        points = [frontier.Point(**fields) for fields in document["points"]]
        cells = [frontier.cells(point, points, is_timed=True)[:-2] for point in points]
        lines, _ = frontier.summary(points, is_timed=True)
        text = "\n".join(lines)
        name = document["model"]
        parts += [f"### {name}", f"![memory against time of {name}](images/gpu_{name}.png)"]
        parts += [markdown_table(frontier.TITLES[:-2], cells), f"```text\n{text}\n```"]
    return "\n\n".join(parts)


def _gpu_peaks(rows: Rows) -> list[Table]:
    found = [gpu_peaks.PeakRow(**fields) for fields in rows]
    return [(gpu_peaks.TITLES[:-2], [gpu_peaks.cells(row)[:-2] for row in found])]


def _gpu_peaks_summary(rows: Rows) -> str:
    return gpu_peaks.summary([gpu_peaks.PeakRow(**fields) for fields in rows])


def _promise(rows: Rows) -> list[Table]:
    return [promise.model_table([Row(**fields) for fields in rows])]


def _code_only(rows: Rows) -> list[Table]:
    """Predicted peak > that of the emitted code, one line a model, and the largest difference of its rows."""
    found = [Row(**fields) for fields in rows]
    lines = []
    for name in dict.fromkeys(row.model for row in found):
        plain, *ours = (row for row in found if row.model == name)
        excess = [row.scheduled_peak_bytes / row.predicted_peak_bytes - 1 for row in ours if row.scheduled_peak_bytes]
        cells = {row.setting: _predicted_and_code(row) for row in ours}
        settings = [cells.get(setting, "-") for setting in (*map(str, promise.FRACTIONS), "min")]
        worst = max(excess, key=abs, default=None)
        lines.append(
            [name, promise.mib(plain.scheduled_peak_bytes), *settings, "-" if worst is None else f"{worst:+.2%}"]
        )
    return [(("model", "plain", *map(str, promise.FRACTIONS), "min", "code over predicted, worst"), lines)]


def _predicted_and_code(row: Row) -> str:
    if row.failure is not None or row.floor_bytes is not None:
        return "-" if row.failure is not None else "floor"
    return f"{promise.mib(row.predicted_peak_bytes)} > {promise.mib(row.scheduled_peak_bytes)}"


def _promise_summary(rows: Rows) -> str:
    return str(promise.summarise([Row(**fields) for fields in rows]))


def _together(rows: Rows) -> list[Table]:
    return [together.table([together.StepRow(**fields) for fields in rows])]


def _slices(rows: Rows) -> list[Table]:
    return [slices.table([slices.SliceRow(**_timed(fields)) for fields in rows])]


def _max_speed(rows: Rows) -> list[Table]:
    return [max_speed.table([max_speed.MaxRow(**_timed(fields)) for fields in rows])]


def _step_time(rows: Rows) -> list[Table]:
    return [step_time.table([step_time.StepTimeRow(**_timed(fields)) for fields in rows])]


def _gap(rows: Rows) -> list[Table]:
    found = [gap.GapRow(**fields) for fields in rows]
    return [gap.gap_table([row for row in found if row.kind != "exact"])]


def _gap_summary(rows: Rows) -> str:
    found = [gap.GapRow(**fields) for fields in rows]
    return "\n".join(
        f"{kind}: {gap.summary([row for row in found if row.kind == kind])}"
        for kind in dict.fromkeys(row.kind for row in found)
    )


def _predicted(rows: Rows) -> list[Table]:
    return [predicted_time.table(_pairs(rows))]


def _predicted_summary(rows: Rows) -> str:
    return predicted_time.summary(_pairs(rows))


def _pairs(rows: Rows) -> list[predicted_time.Pair]:
    return [predicted_time.Pair(**fields) for fields in rows]


def _floor(rows: Rows) -> list[Table]:
    return [floor.table([floor.FloorRow(**fields) for fields in rows])]


def _scale(rows: Rows) -> list[Table]:
    return [scale.scale_table([scale.ScaleRow(**fields) for fields in rows])]


def _cuda_codegen(rows: Rows) -> list[Table]:
    return [cuda_codegen.table(_codegen_rows(rows))]


def _cuda_codegen_summary(rows: Rows) -> str:
    return cuda_codegen.summary(_codegen_rows(rows))


def _first_step(rows: Rows) -> list[Table]:
    return [first_step.table([first_step.FirstStepRow.of(fields) for fields in rows])]


def _first_step_summary(rows: Rows) -> str:
    return first_step.summary([first_step.FirstStepRow.of(fields) for fields in rows])


def _planning_time(rows: Rows) -> list[Table]:
    return [planning_time.table([planning_time.PlanningTimeRow(**fields) for fields in rows])]


def _planning_time_summary(rows: Rows) -> str:
    return planning_time.summary([planning_time.PlanningTimeRow(**fields) for fields in rows])


def _inputs(rows: Rows) -> list[Table]:
    return [(inputs.TITLES, inputs.table([inputs.InputsRow(**fields) for fields in rows]))]


def _conv_gradients(rows: Rows) -> list[Table]:
    return [conv_gradients.medians([conv_gradients.GradientRow(**fields) for fields in rows])]


def _workspaces(rows: Rows) -> list[Table]:
    return [workspaces.table([workspaces.WorkspaceRow(**fields) for fields in rows])]


def _forecast_facts(rows: Rows) -> list[Table]:
    return [forecast_facts.table([forecast_facts.ForecastRow(**fields) for fields in rows])]


def _forecast_facts_summary(rows: Rows) -> str:
    return forecast_facts.summary([forecast_facts.ForecastRow(**fields) for fields in rows])


def _workspaces_summary(rows: Rows) -> str:
    return workspaces.summary([workspaces.WorkspaceRow(**fields) for fields in rows])


def _codegen_rows(rows: Rows) -> list[cuda_codegen.CodegenRow]:
    return [cuda_codegen.CodegenRow(**fields) for fields in rows]


def _zoo(rows: Rows) -> list[Table]:
    return [zoo_summary.model_table([ZooRow.of(fields) for fields in rows])]


def _zoo_summary(rows: Rows) -> str:
    return zoo_summary.text_of([ZooRow.of(fields) for fields in rows])


def _timed(fields: dict[str, Any]) -> dict[str, Any]:
    """The fields of a row with its measured ratios as values of their type."""
    return {k: RatioInterval(**v) if isinstance(v, dict) and "pairs" in v else v for k, v in fields.items()}


ESTIMATES = "plan_estimates.txt"


def _estimates() -> str:
    blocks = [f"```text\n{block.rstrip()}\n```" for block in _blocks((RESULTS / ESTIMATES).read_text())]
    text = """\
## Training steps on devices that are not there

Estimates of the cost model, not measurements: no data is allocated and nothing runs. `fits` compares parameters, gradients,
optimizer state and the region peak with the device's capacity less the reserve. The tables put what people do today on the same
timeline under the same prices; "ours within it" is the extra time of our plan at the same peak, "ours faster by" the difference
as a share of the other policy's step.

Extra times in them are those above the fastest plan, which `plan` printed until it measured from plain torch.compile's own plan
(`torch's chooser, default`) and counted the traffic of saving in each step.

They were printed before `plan` counted the optimizer's step behind the backward, which for AdamW on a GPU takes one root of each
parameter beside all gradients: its line is missing, and where that is more than the region peak, the sum is larger now."""
    return "\n\n".join([text, *blocks])


def _blocks(text: str) -> Iterator[str]:
    """One for each command, which begins with a dollar sign."""
    for block in text.split("\n$ "):
        yield block if block.startswith("$ ") else f"$ {block}"


ON_THIS_PROCESSOR = """ The processor has instructions for bfloat16: on one without, a
convolution converts what it reads and needs more memory than all else."""


def _of_version(version: str, dtype: str) -> Section:
    """Six models on another torch; what is not in the file was not run."""
    file = f"promise_{dtype}_code_torch{version}_cpu.json"
    return Section(
        f"Six models on torch {version}, {dtype}, by code generation alone",
        file,
        f"python -m benchmarks.promise --dtype {dtype} --code-only --only remat --model gpt --model bert --model resnet "
        f"--model unet --model llama --model vit --json benchmarks/results/{file}",
        """\
Predicted peak > peak of the C++ code that Inductor emits, by a dry run; `plain` is the code of plain `torch.compile`, and budgets
are 0.8, 0.6, 0.4 and 0.3 of it. Nothing is built and no peak is measured. "floor": the budget is below the lowest reachable peak.
Models that are not in the table were not run."""
        + (ON_THIS_PROCESSOR if dtype == "bfloat16" else ""),
        _code_only,
        _promise_summary,
    )


def _of_source(key: str) -> Section:
    """One source of the published record; all of them are in one file."""
    source, file = SOURCES[key], "published.json"
    return Section(
        source.title,
        file,
        f"python -m benchmarks.published --source {key} --json benchmarks/results/{file}",
        source.text,
        lambda rows: literature_tables.tables(rows_of(rows, key)),
        lambda rows: literature_tables.summary(rows_of(rows, key)),
    )


BEFORE_SPLIT = (
    "Rows of models with convolutions are from before the gradients of their weights and inputs were made apart."
)

SECTIONS = (
    Section(
        "Peaks on a GPU",
        "gpu_peaks_h200.json",
        "python -m benchmarks.gpu_peaks --workers 16 --json benchmarks/results/gpu_peaks_h200.json",
        """\
The models of `benchmarks.cuda_codegen` on the device: byte budgets of 0.8, 0.5 and 0.3 of plain's measured peak, `min`, and
torch's own `activation_memory_budget` at 0.5 and 0.1. `dry run` is the peak of the emitted code by a dry run; errors are against
what was measured. "floor": the budget is below the lowest reachable peak. gpt, llama, resnet and unet in bfloat16 were measured
once more at 0.8, 0.5 and `min`, after plans and dry runs had begun to count what the allocator leaves with a large buffer: of the
four rows in the first run that were up to 0.6 % above their budget, the U-Net's stayed (0.2 %); the two of the ResNet in float32
(0.1 %) are of the first run. Torch's own budgets give other gradients where a model has dropout (bert, vit): its recomputation
draws other random numbers. ResNet's gradients (0.9 from plain's in three of the contest's plans, 5.8e-2 in float32 here) are
unexplained; what a CPU shows is in [correctness](correctness.md#gradients-of-convolutions).
Three predictions of the first run are far too low: the U-Net in float32
at `min` (14 %), ConvNeXt in float32 at `min` (8 %; at larger budgets the code was planned once more), the vision transformer in
bfloat16 at `min` (3 %). The U-Net's rules are in the planner since, and its convolutions' workspaces are measured in the layout
that the code has, which is what ConvNeXt's most likely lacked; neither was measured again. The vision transformer's is a mask
that its backward draws again ([limits](memory-model.md#limits)).""",
        _gpu_peaks,
        _gpu_peaks_summary,
    ),
    Section(
        "Eighteen models inside budgets",
        "promise_cpu.json",
        "python -m benchmarks.promise --rivals benchmarks/results/promise_rivals_cpu.json",
        """\
Measured peaks under 0.8, 0.6, 0.4 and 0.3 of plain `torch.compile`'s measured peak, handed over in bytes, and under `min`. "floor":
the budget is below the lowest reachable peak, and a `BudgetError` says so. "torch's lowest" is the lowest measured peak over nine
values of `torch._functorch.config.activation_memory_budget` (`promise_rivals_cpu.json`, measured on an Intel Xeon). Models marked *
were written before the memory model was fitted, + have 8 blocks or more. "gradients" is their share of the default peak; "without
them" is min/torch's with the gradients' bytes taken off both. "worst error" compares predicted and measured peak: of `fourier`,
`experts` and `recurrent` it is the bytes of the output, which plans count until the step ends and this benchmark's steps drop
before their backward (`--hold` holds it).""",
        _promise,
        _promise_summary,
    ),
    *(
        Section(
            f"The same in {name}",
            f"promise_{name}_cpu.json",
            f"python -m benchmarks.promise --dtype {name} --only remat --empty-kernels --json "
            f"benchmarks/results/"
            f"promise_{name}_cpu.json",
            f"""\
Measured peaks as above, with {name}; torch's own settings were not run. The emitted code allocates, and the libraries that it
calls run, as in training; the kernels that Inductor emits, which allocate nothing, are left out.{rest}""",
            _promise,
            _promise_summary,
        )
        for name, rest in (
            ("bfloat16", " fourier cannot run in\nbfloat16."),
            ("autocast", " Models that are not in the table\nwere not run."),
        )
    ),
    *(_of_version(version, dtype) for version in ("2.11", "2.15") for dtype in ("float32", "bfloat16")),
    Section(
        "Below the floor: gradients that leave early",
        "floor_cpu.json",
        "python -m benchmarks.floor --json benchmarks/results/floor_cpu.json",
        """\
Peaks of steps in which a hook frees each gradient, under eager mode, plain `torch.compile`, and at `min` with gradients that leave
at the end of the backward and when they are made ([`gradients="early"`](early-gradients.md)). "predicted" is the plan's figure for
the last of them, "asked" what it was to reach. "error" is the largest difference of a gradient from eager mode's or plain
torch.compile's, whichever is nearer, as a part of the largest number in it: through the norms of a ResNet these two differ
by 1 %.""",
        _floor,
    ),
    Section(
        "Triton code for an H100 that is not there",
        "cuda_codegen.json",
        "python -m benchmarks.cuda_codegen --json benchmarks/results/cuda_codegen.json",
        """\
Code generation alone, no GPU: peaks of the code that Inductor emits, by a dry run of its wrappers. `plain` is torch's own
partitioner, "torch's best" its lowest peak over four values of `activation_memory_budget` on the same code. Budgets are 0.8, 0.5
and 0.3 of plain, in bytes, and `min`: the peak that the plan predicts > that of the first code emitted for it, and how often it was
planned and compiled. "floor": the budget is below the lowest reachable peak, and a `BudgetError` says so. "worst excess": of the
first code over its prediction. What a real device adds (workspaces of cuDNN and cuBLAS) is not in it.""",
        _cuda_codegen,
        _cuda_codegen_summary,
    ),
    Section(
        "Forecasts against the code for an H100 that is not there",
        "forecast_facts.json",
        "python -m benchmarks.forecast_facts --json benchmarks/results/forecast_facts.json",
        """\
Peaks in MiB. `emitted`: of the code that training would run under that budget, emitted on the fake device, by a dry run.
`observed`: what [`compile-remat plan`](forecast.md) predicts where it has the plan's graphs lowered for the device, in a process of
its own. `estimate`: what it predicts by rules, with `--estimate` or without g++ and triton; under 0.5 its plan has another budget,
half of an estimated peak of plain `torch.compile`. "seconds": wall time of the two forecasts, on two cores shared with others.""",
        _forecast_facts,
        _forecast_facts_summary,
    ),
    Section(
        "CPU time until training runs",
        "first_step_cpu.json",
        "python -m benchmarks.first_step --json benchmarks/results/first_step_cpu.json",
        """\
CPU seconds of a process and its compilers until the end of the third step, importing torch among them, in empty folders for what
torch compiles; "warm": of a second process that finds them filled. Ratios are to plain `torch.compile` of the same model.
"lowered" counts the graphs that Inductor made code for, forwards and backwards apart, over all rounds and steps.
"compilers" counts the files that were handed to the C++ compiler: under a budget, kernels are built together, in one file for each
compiling process. Much of each row in empty folders is the same for all: torch and its headers. The models of
transformers have 4 layers of width 256. The machine was busy with other things, which distorts CPU time much less than wall
time.""",
        _first_step,
        _first_step_summary,
    ),
    Section(
        "What operators take beside their outputs",
        "workspaces_cpu.json",
        "python -m benchmarks.workspaces --json benchmarks/results/workspaces_cpu.json",
        """\
Each operator runs once by itself, and the allocator is watched. "Inductor calls it": the code that Inductor emits for this
operator alone calls it, instead of a kernel of Inductor's own. "plan": what the memory model counts for it while it runs.""",
        _workspaces,
        _workspaces_summary,
    ),
    Section(
        "What it costs to read only the inputs that plain torch.compile reads",
        "inputs_cpu.json",
        "python -m benchmarks.inputs --json benchmarks/results/inputs_cpu.json",
        """\
Predicted lowest peaks, and extra time at shares of plain's peak, under `inputs="as_plain"`; "cost" is the difference from
`constant`, of the peak or of the step's time, "copies" what plans save of inputs. The last four models have frozen parts.
`recurrent` and `frozen stem` have an input that plain does not read again, and from which `constant` recomputes for nothing: the
cost is that tensor (17.25 of 27.1 MiB; 4 of 16.5), `llama`'s is its embedding. `wavenet` is the search: its copies take less
than 0.01 MiB, and the plan found under `constant` has 51.41 MiB (in `densenet`, `fourier`, `teacher` it is the higher one).
See [correctness](correctness.md#inputs-that-change-before-the-backward).""",
        _inputs,
    ),
    Section(
        "Gradients of convolutional models against float64",
        "conv_gradients_cpu.json",
        "python -m benchmarks.conv_gradients --toy --compiler eager --json benchmarks/results/conv_gradients_cpu.json",
        """\
Medians over five seeds. "error" is a setting's distance from the gradients in float64, "of plain" plain's; "ratio" the one over the
larger of the other and 2 ulp; "forward" and "backward" what the type's rounding does to float64's gradients, whatever computes
them. See [correctness](correctness.md#gradients-of-convolutions). The ResNet of 16 bottlenecks has no row "order".""",
        _conv_gradients,
    ),
    Section(
        "The same through Inductor",
        "conv_gradients_inductor_cpu.json",
        "python -m benchmarks.conv_gradients --toy --model resnet --dtype float32 --json "
        "benchmarks/results/conv_gradients_inductor_cpu.json",
        "",
        _conv_gradients,
    ),
    Section(
        "Several graphs under one budget",
        "together_cpu.json",
        "python -m benchmarks.together --json benchmarks/results/together_cpu.json",
        """\
Peaks of whole steps: `blocks` compiles each block of the GPT by itself, `breaks` has three graph breaks, `apart` compiles an
encoder and a decoder one by one. `first` is the first step, `later` the highest of three more. In `apart` the first graph to run
is planned as if it were alone: a warning of the first step says what both need. Plans that are made for all graphs together run
from the second or third step on.""",
        _together,
    ),
    Section(
        "`max` against plain torch.compile",
        "max_speed_cpu.json",
        "python -m benchmarks.max_speed",
        """\
Without a budget the default on a CPU is `max`: it must not cost memory or time. Medians of the ratios of 30 interleaved pairs of
steps, with 95 % intervals; the ratio plain/plain, of a second plain compilation, shows the noise.""",
        _max_speed,
    ),
    Section(
        "Step time inside a budget",
        "step_time_cpu.json",
        "python -m benchmarks.step_time",
        "Interleaved with plain `torch.compile`, as above.",
        _step_time,
    ),
    Section(
        "Rows in slices",
        "slices_cpu.json",
        "OMP_NUM_THREADS=1 python -m benchmarks.slices --pairs 8",
        """\
The lowest peak with [`slices="auto"`](slices.md) and without. `head`: a layer of width 128, 2,048 rows, 8,192 words and the
loss. `gpt`: two blocks of width 256, 4,096 tokens, 32,768 words, bfloat16, logits in float32. `long`: one block
`x + down(gelu(up(norm(x))))` of width 256 on a sequence of 16,384. Then the step inside 0.6 of the whole graph's `min`, timed
against that `min`, interleaved. "kernels" counts the C++ sources of forward and backward at `min`, whole and in slices, "files"
what the C++ compiler is called with for that step in empty folders, headers included: kernels are built together. One thread, on
a machine that was busy with other things. The row of `gpt` is an earlier one (2026-11-25 00:26 UTC), with
steps of 2 s: on the processor of the others, without instructions for bfloat16, three did not end in a quarter of an hour.""",
        _slices,
    ),
    Section(
        "Plans against lower bounds and optima",
        "gap_cpu.json",
        "python -m benchmarks.gap",
        """\
Nothing is compiled. `extra` is the time of recomputation as a share of the step, `bound` a time that no plan can beat which
recomputes each value at most once. Budgets are shares of the predicted peak of the fastest plan; `floor` is the lowest peak
found, `least` one that no plan goes below. The last six models and the rows of layers were not tuned to; `exact` are small
copies of nine models, all plans simulated. At the lowest budget of the densenet's copy no plan was found that fits: the lowest one
is 0.04 % above it. All are of one day.""",
        _gap,
        _gap_summary,
    ),
    *map(_of_source, SOURCES),
    Section(
        "Predicted against measured time of recomputation",
        "predicted_time_cpu.json",
        "OMP_NUM_THREADS=1 python -m benchmarks.predicted_time --calibrate 75 --pairs 14",
        """\
The cost model `roofline` with figures calibrated in the same run. Extra times are against the plan `max`, in interleaved pairs.
Where the extra
time is a few per cent of the step, its relative error is large and its error as a share of the step ("of step") is small.""",
        _predicted,
        _predicted_summary,
    ),
    Section(
        "Planning time beside torch's partitioner",
        "planning_time_cpu.json",
        "python -m benchmarks.planning_time --phases --json benchmarks/results/planning_time_cpu.json",
        """\
CPU seconds between the joint graph and two modules, on one graph in one run: torch's partitioner at its budget 0.5, ours at 0.5
(with the plain peak that the fraction is of) and at `min`. `one search` and `frontier` are searches alone, on one problem.
Aimed at, and missed: 0.6 in the median and 1.1 at worst for 0.5, twice that for `min`. A frontier was to take less than 5 plans:
of whole plans ("0.5") it takes 0.3 to 3.0, and 4.2 on encoder_decoder; of searches alone more. They are the lowest of five
turns, beside another process. Where one search is a small part of ours at 0.5, the rest is what torch
does as well (preparing and extracting graphs) and three problems: for the plain peak, for the search, and for the plan's own
graphs. Each model's 0.5 is of its own plain peak.""",
        _planning_time,
        _planning_time_summary,
    ),
    Section(
        "Architectures of others, plans read off Inductor",
        "zoo_after.json",
        "python -m benchmarks.zoo --setting min --json benchmarks/results/zoo_after.json",
        """\
The models of the next table, whose plans are lowered by Inductor and read before any code is made: all at `min`, a part of them at
other budgets. `python -m benchmarks.zoo --compare benchmarks/results/zoo_before.json benchmarks/results/zoo_after.json` puts both
beside each other. `monai_unet` is higher in the second: on that machine oneDNN takes 14.7 MB for a convolution, and the code of the
first needs 21.2 MB on it.""",
        _zoo,
        _zoo_summary,
    ),
    Section(
        "Architectures of others, plans imitating Inductor",
        "zoo_before.json",
        "python -m benchmarks.zoo --json benchmarks/results/zoo_before.json",
        """\
Architectures of transformers, timm, diffusers, torch_geometric and others (`pip install -e '.[zoo]' -c constraints.txt`), which
nobody fitted the memory model to: random weights, toy width, 3 to 6 layers, plans as of the date below. Predicted peak > that of
the emitted code by a dry run, at `max`, under bytes of 0.6 and 0.4 of plain torch.compile's, and at `min`. Of several graphs the
largest. "floor": the budget is below the lowest reachable peak; "worst" is the prediction furthest from the code.""",
        _zoo,
        _zoo_summary,
    ),
    Section(
        "Planning time against the size of the graph",
        "scale_cpu.json",
        "python -m benchmarks.scale --points 20",
        """\
Transformer layers made without a model, planned at 0.7 of the fastest plan's peak. CPU seconds of one plan, host memory beyond the
problem's own, and CPU seconds of the lowest peak ("floor") and of a frontier of 20 budgets.""",
        _scale,
    ),
)
