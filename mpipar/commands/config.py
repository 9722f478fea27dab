"""The command line of `mpipar.train`, and a configuration file with the same names."""

from __future__ import annotations

import dataclasses
import io
import math
import os
import re
import sys
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from typing import Annotated, Literal

import tyro

from mpipar.comm import launcher
from mpipar.parallel.deterministic import check_deterministic
from mpipar.parallel.overlap import check_overlap
from mpipar.parallel.pipeline.check import read_plan
from mpipar.parallel.pipeline.schedule import ONE_CHUNK, SCHEDULES, SEVERAL_CHUNKS, Plan, build

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

LATER = {
    "experts", "ep", "cp", "checkpoint", "save-every", "keep", "resume",
}  # fixed names of things that don't exist yet: refused by name, never ignored


@dataclass(frozen=True)
class Config:
    """Train a GPT or a deep MLP over the ranks that mpirun started: mpirun -np N python -m mpipar.train [OPTIONS]."""

    config: Annotated[str | None, tyro.conf.arg(metavar="FILE.toml")] = None
    """Read options from a TOML file (the same names, - or _); flags override it."""
    model: Literal["gpt", "mlp"] = "gpt"
    """gpt: pre-norm GPT-2. mlp: the lecture's X <- GeLU(X W) with the mean of squares as loss."""
    layers: int = 4
    """Transformer blocks, or layers of the MLP."""
    dim: int | None = None
    """Model width [default: 128 for gpt, 1024 for mlp]."""
    heads: int = 4
    """Attention heads (gpt)."""
    seq: int = 128
    """Tokens in a sequence (gpt)."""
    vocab: int = 256
    """Size of the vocabulary (gpt); 256 for bytes."""
    tied: bool = True
    """Use the embedding as the output head (gpt)."""
    dropout: float = 0.0
    """Probability with which an element is dropped after the embedding and after each branch (gpt)."""
    dp: int | None = None
    """Replicas, data parallelism [default: what tp and pp leave]."""
    tp: int | None = None
    """Ranks that share each layer, tensor parallelism [default: what dp and pp leave if dp is given, else 2 if 4
    divides the ranks, else 1]."""
    pp: int = 1
    """Pipeline stages."""
    order: str = "dp,pp,tp"
    """The mesh's axes, slowest first."""
    schedule: Annotated[str, tyro.conf.arg(metavar="NAME|FILE.csv")] = "1f1b"
    """Order of the micro-batches in the pipeline: naive, gpipe, 1f1b, eager-1f1b, interleaved, zero-bubble (ZB-H1), zb-h2,
    zb-v, or a file with one line a rank of actions such as 0F3,0B3 (stage, kind, micro-batch)."""
    micro_batches: int | None = None
    """Parts into which each replica cuts its rows [default: 1 without a pipeline, else 2 x stages if that many rows]."""
    virtual_stages: int | None = None
    """Stages on each pipeline rank [default: 2 for interleaved and zb-v, else 1]."""
    balance: Literal["layers", "flops", "measured"] = "layers"
    """How to divide the layers over the stages: as many on each, by counted FLOPs, or by the times of a warm-up step."""
    recompute: Literal["none", "attention", "full"] = "none"
    """Activations to drop in forward and make again in backward: those of attention (gpt), or all of a layer but its input."""
    layers_per_stage: str | None = None
    """Layers of each stage, such as 3,2,2 [default: as even as possible, the first stages one more]."""
    zero: Literal[0, 1, 2, 3] = 0
    """What the replicas divide: 1 the optimizer's state, 2 the gradients too, 3 the parameters too."""
    global_batch: int | None = None
    """Samples of a step over all replicas [default: 16 for gpt, 128 for mlp, or the next number that dp divides]."""
    steps: int = 400
    """Optimizer steps."""
    optimizer: Literal["adamw", "sgd"] = "adamw"
    """adamw or plain sgd."""
    lr: float = 3e-3
    """Peak learning rate."""
    lr_min: float | None = None
    """Learning rate at the end of the cosine [default: a tenth of --lr]."""
    warmup: int = 20
    """Steps of linear warm-up."""
    beta1: float = 0.9
    """AdamW: decay of the first moment."""
    beta2: float = 0.99
    """AdamW: decay of the second moment."""
    weight_decay: float = 0.1
    """Decoupled weight decay of matrices and embeddings."""
    clip: float = 1.0
    """Largest norm of the whole gradient; 0 switches clipping off."""
    dtype: Literal["float32", "float64", "bfloat16"] = "float32"
    """Type of parameters, activations and messages; with bfloat16 sums, gradients and master weights are float32."""
    seed: int = 0
    """Of initial values, data order and dropout."""
    data: str = "builtin"
    """builtin (the topics of Python's documentation), random, or the path of a text file."""
    held_out: float = 0.1
    """Share of the text, its tail, that is kept for evaluation."""
    eval_every: int = 0
    """Evaluate every K steps; 0: only at the end."""
    eval_steps: int = 10
    """Global batches of an evaluation; 0: never evaluate."""
    generate: int = 200
    """Bytes of text to generate at the end (gpt on text); 0: none."""
    comm: Literal["auto", "mpi", "shm"] = "auto"
    """How replicas of one node exchange gradients and parameters: mpi by messages, shm by shared memory, auto by size.
    With --zero 3, shm keeps one copy of the parameters for a node."""
    overlap: Annotated[bool, tyro.conf.arg(help_behavior_hint="")] = None  # None: not said; never parsed, see `from_flags`
    """Sum gradients over the replicas while the last backward pass computes [default: where replicas are on several nodes, or
    the node has more cores than its ranks have threads]. Without ZeRO."""
    bucket_mb: float | None = None
    """With overlap: million bytes of gradients that are sent at once, rounded up to whole blocks [default: 4]."""
    compress: Literal["bfloat16"] | None = None
    """Round float32 gradients for the messages between replicas, which then have half the bytes; sums are float32.
    With --zero too (parameters stay whole)."""
    deterministic: bool = False
    """Sum in an order that doesn't depend on dp: dp 1, 2, 4, ... with the same dp x --micro-batches give the same bits."""
    gemm: Literal["numba", "vector", "blas"] = "numba"
    """Matrix products by mpipar's kernels; by those without the matrix unit that some CPUs have; or by NumPy's BLAS."""
    threads: int | None = None
    """Threads of a rank [default: cores of the affinity mask / ranks on the node]."""
    metrics: Annotated[str | None, tyro.conf.arg(metavar="FILE")] = None
    """Write one JSON object a line: start, every step, evaluations, end (an older metrics file is replaced)."""
    trace: Annotated[str | None, tyro.conf.arg(metavar="DIR")] = None
    """Write the last step of each pipeline into this folder: a trace for ui.perfetto.dev, and with matplotlib a picture."""
    stage_delay: Annotated[float | None, tyro.conf.arg(metavar="MS")] = None
    """Each pipeline rank sleeps MS for a forward and MS for a backward instead of computing: shows a schedule on few cores."""
    quiet: bool = False
    """Print nothing but errors."""

    def resolved(self, ranks: int) -> "Config":
        """The configuration with every default that depends on the others filled in."""
        gpt = self.model == "gpt"
        tp = self.tp
        if tp is None and self.dp is not None:  # what dp and pp leave
            tp = max(ranks // max(self.dp * self.pp, 1), 1)
        elif tp is None:
            tp = 2 if ranks % 4 == 0 and ranks % (2 * self.pp) == 0 else 1
        dp = self.dp if self.dp is not None else max(ranks // max(tp * self.pp, 1), 1)
        batch = self.global_batch
        if batch is None:
            batch = -(-(16 if gpt else 128) // max(dp, 1)) * max(dp, 1)  # the next number that dp divides
        rows = batch // max(dp, 1)
        micro, by_hand = self.micro_batches, self.hand_written()
        if by_hand:
            micro = self._micro_batches_of(by_hand)
        elif micro is None:
            micro = 1 if self.pp == 1 else max(min(2 * self.pp, rows), 1)
        virtual = self.virtual_stages
        if virtual is None:
            virtual = 2 if self.schedule in SEVERAL_CHUNKS else 1
        return dataclasses.replace(
            self, virtual_stages=virtual, tp=tp, dp=dp, global_batch=batch, micro_batches=micro,
            dim=self.dim if self.dim is not None else (128 if gpt else 1024),
            lr_min=self.lr_min if self.lr_min is not None else self.lr / 10,
        )

    def check(self) -> None:
        """Refuse numbers that can't be meant (of a resolved configuration); ValueError names what would do."""
        for name in ("layers", "dim", "heads", "seq", "vocab", "global_batch", "micro_batches", "virtual_stages"):
            if getattr(self, name) < 1:
                raise ValueError(f"{flag(name)} {getattr(self, name)} is not valid: it must be at least 1")
        for name in ("steps", "warmup", "eval_every", "eval_steps", "generate", "clip", "weight_decay", "seed", "lr", "lr_min"):
            if not 0 <= getattr(self, name) < math.inf:
                raise ValueError(f"{flag(name)} {getattr(self, name)} is not valid: it must be a number of at least 0")
        for name in ("beta1", "beta2", "held_out", "dropout"):
            if not 0 <= getattr(self, name) < 1:
                raise ValueError(f"{flag(name)} {getattr(self, name)} is not valid: it must lie in [0, 1)")
        self._check_model()
        self._check_pipeline()
        if self.stage_delay is not None and not 0 < self.stage_delay < math.inf:
            raise ValueError(f"--stage-delay {self.stage_delay} is not valid: it must be a number of milliseconds above 0")
        if self.threads is not None and self.threads < 1:
            raise ValueError(f"--threads {self.threads} is not valid: it must be at least 1")
        if self.global_batch % self.dp:
            valid = [n for n in range(1, self.global_batch + 1) if self.global_batch % n == 0]
            raise ValueError(f"--global-batch {self.global_batch} is not divisible by dp={self.dp}: dp can be one of {valid}")
        check_deterministic(self.deterministic, self.zero, self.dp)
        check_overlap(self.overlap, self.bucket_mb, self.compress, zero=self.zero, deterministic=self.deterministic,
                      dtype=self.dtype, back_end=self.comm)
        rows = self.global_batch // self.dp
        if self.micro_batches > rows:
            raise ValueError(f"--micro-batches {self.micro_batches} is more than the {rows} rows of a replica: at most {rows}")

    def _check_model(self) -> None:
        """Options that would do nothing for this model or these data are refused."""
        default = Config()
        if self.model == "mlp":
            for name in ("heads", "seq", "vocab", "tied", "dropout", "generate"):
                if getattr(self, name) != getattr(default, name):
                    raise ValueError(f"{flag(name)} is an option of --model gpt: leave it out for --model mlp")
            if self.recompute == "attention":
                raise ValueError("--recompute attention is an option of --model gpt: --model mlp takes none or full")
        if self.dtype == "bfloat16" and self.comm == "shm":
            raise ValueError("--comm shm has no bfloat16: take --comm auto or mpi, or --dtype float32")
        if self.dtype == "bfloat16" and self.gemm == "blas":
            raise ValueError("--gemm blas has no bfloat16: take --gemm numba, or --dtype float32")
        if self.data == "random" and self.eval_every:
            raise ValueError("--eval-every needs held-out text: --data random has none")

    def _check_pipeline(self) -> None:
        """The schedule, its virtual stages and the layers have to fit."""
        if self.schedule in SEVERAL_CHUNKS and self.virtual_stages < 2:
            raise ValueError(f"--schedule {self.schedule} needs --virtual-stages of at least 2")
        if self.schedule in ONE_CHUNK and self.virtual_stages > 1:
            raise ValueError(f"--virtual-stages {self.virtual_stages} needs --schedule interleaved, zb-v, gpipe or naive")
        if self.balance != "layers" and self.layers_per_stage is not None:
            raise ValueError(f"--balance {self.balance} and --layers-per-stage both divide the layers: leave one out")
        if self.balance == "measured" and self.stage_delay is not None:
            raise ValueError("--balance measured has nothing to measure with --stage-delay: leave one out")
        stages = 1 + max(action.stage for actions in self.plan() for action in actions)
        if self.layers < stages:
            raise ValueError(f"--layers {self.layers} do not fill the {stages} stages of pp={self.pp}, --schedule {self.schedule}: "
                             f"give at least {stages} layers, or fewer stages")

    def plan(self) -> Plan:
        """The schedule of a resolved configuration: who runs what, in which order."""
        by_hand = self.hand_written()
        return by_hand or build(self.schedule, self.pp, self.micro_batches, self.virtual_stages)

    def hand_written(self) -> Plan | None:
        """The plan in the file that --schedule names, proved right; None where it names no file.

        ValueError for a file that can't be read or is wrong, and for a name that is neither.
        """
        if self.schedule in SCHEDULES:
            return None
        if not (self.schedule.endswith(".csv") or os.path.exists(self.schedule)):
            raise ValueError(f"--schedule {self.schedule!r} is not valid: one of {', '.join(SCHEDULES)}, or a FILE.csv")
        return read_plan(self.schedule)

    def _micro_batches_of(self, plan: Plan) -> int:
        """The micro-batches of a hand-written plan; ValueError if other options say something else than the plan."""
        micros = 1 + max(action.micro_batch for actions in plan for action in actions)
        if len(plan) != self.pp:
            raise ValueError(f"--schedule {self.schedule!r} has {len(plan)} line{'s' * (len(plan) > 1)}, one a rank: "
                             f"it needs --pp {len(plan)}, not {self.pp}")
        if self.micro_batches not in (None, micros):
            raise ValueError(f"--schedule {self.schedule!r} has {micros} micro-batches, not {self.micro_batches}: "
                             "leave --micro-batches out")
        if self.virtual_stages is not None:
            raise ValueError(f"--schedule {self.schedule!r} says itself which stages a rank has: leave --virtual-stages out")
        return micros

    def stage_layers(self) -> list[int] | None:
        """--layers-per-stage as numbers; ValueError if it is not a list of them."""
        if self.layers_per_stage is None:
            return None
        try:
            return [int(n) for n in re.split(r"[,+ ]+", self.layers_per_stage.strip())]
        except ValueError:
            raise ValueError(f"--layers-per-stage {self.layers_per_stage!r} is not a list of numbers such as 3,2,2") from None

    def axes(self) -> tuple[str, ...]:
        """--order as the names of the axes."""
        return tuple(self.order.replace(",", " ").split())


def flag(name: str) -> str:
    """The flag of a field: global_batch -> --global-batch."""
    return "--" + name.replace("_", "-")


def parse(arguments: list[str]) -> Config:
    """The configuration from flags and the file of --config; flags win. ValueError, one line, for what is not valid.

    --help prints the options and raises SystemExit(0).
    """
    for argument in arguments:
        name = argument.removeprefix("--").split("=")[0].replace("_", "-")
        if argument.startswith("--") and name in LATER:
            raise ValueError(f"--{name} does not exist yet in this version of mpipar")
    if sum(argument == "--config" or argument.startswith("--config=") for argument in arguments) > 1:
        raise ValueError("--config is given twice: one file only")
    path = config_path(arguments)
    default = Config() if path is None else read_file(path)
    return from_flags(arguments, default)


def config_path(arguments: list[str]) -> str | None:
    """The file named by --config, if any."""
    for i, argument in enumerate(arguments):
        if argument == "--config" and i + 1 < len(arguments):
            return arguments[i + 1]
        if argument.startswith("--config="):
            return argument.split("=", 1)[1]
    return None


def read_file(path: str) -> Config:
    """A configuration file; ValueError for a missing file, bad TOML, an unknown name or a value of the wrong type."""
    try:
        with open(path, "rb") as file:
            values = tomllib.load(file)
    except OSError as error:
        raise ValueError(f"--config {path!r} can't be read: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"--config {path!r} is not valid TOML: {error}") from None
    default = Config()
    known = [field.name for field in dataclasses.fields(Config) if field.name != "config"]
    arguments = []
    for key, value in values.items():
        if key.replace("_", "-") in LATER:
            raise ValueError(f"{key} in {path!r} does not exist yet in this version of mpipar")
        if key.replace("-", "_") not in known:
            raise ValueError(f"{key} in {path!r} is not an option: valid are {', '.join(known)}")
        is_switch = key == "overlap" or isinstance(getattr(default, key.replace("-", "_")), bool)
        if is_switch != isinstance(value, bool):
            raise ValueError(f"{key} = {value!r} in {path!r} is not valid: it must {'' if is_switch else 'not '}be true or false")
        arguments.append(as_flag(key, value))
    try:
        return from_flags(arguments, default)
    except ValueError as error:
        raise ValueError(f"{path!r}: {error}") from None


def as_flag(key: str, value) -> str:
    """A value of the file as the flag that says the same."""
    name = flag(key)
    if isinstance(value, bool):
        return name if value else name.replace("--", "--no-", 1)
    if isinstance(value, list):
        value = ",".join(str(v) for v in value)
    return f"{name}={value}"


def from_flags(arguments: list[str], default: Config) -> Config:
    """Parse flags over defaults; ValueError as `one_line_cli`."""
    plain = dataclasses.replace(default, overlap=bool(default.overlap))  # a pair of flags can't say that neither was given
    parsed = one_line_cli(Config, arguments, prog="python -m mpipar.train", default=plain)
    given = any(argument in ("--overlap", "--no-overlap") for argument in arguments)
    return parsed if given else dataclasses.replace(parsed, overlap=default.overlap)


def one_line_cli(kind, arguments: list[str], *, prog: str, **options):
    """Parse flags into a dataclass; the parser's own message becomes the one line of a ValueError.

    --help prints the options and raises SystemExit(0).
    """
    caught = io.StringIO()
    try:
        with redirect_stderr(caught), redirect_stdout(caught):
            return tyro.cli(kind, args=arguments, prog=prog, **options)
    except SystemExit as error:
        if not error.code:
            if launcher.rank() == 0:
                print(caught.getvalue(), end="")
            raise
        raise ValueError(one_line(caught.getvalue())) from None


def one_line(message: str) -> str:
    """The parser's message, drawn in a box over several lines, as one plain line with the flags that come near."""
    plain = re.sub(r"\x1b\[[0-9;]*m", "", message)
    parts = [" ".join(re.sub(r"[│╭╮╰╯┌┐└┘]+", " ", part).split()) for part in re.split(r"[─-]{5,}", plain)]
    text = next((part for part in parts[1:] if part), parts[0])
    wrong = re.search(r"Error parsing (--[a-z0-9-]+).*?(?:from \['(.*?)'\]|literal.*?: '(.*?)'|to float: '(.*?)')", text)
    if wrong:
        return f"{wrong[1]} {next(filter(None, wrong.groups()[1:]), '')!r} is not a number of the kind that it needs"
    if "Perhaps you meant" in plain:
        near = dict.fromkeys(re.findall(r"--[a-z][a-z0-9-]*", plain.split("Perhaps you meant")[1]))
        text += f"; perhaps you meant {' or '.join(name for name in near if name != '--help')}"
    return text
