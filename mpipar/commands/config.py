"""The command line of `mpipar.train`, and a configuration file with the same names."""

from __future__ import annotations

import dataclasses
import io
import math
import re
import sys
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from typing import Annotated, Literal

import tyro

from mpipar.comm import launcher
from mpipar.parallel.deterministic import check_deterministic
from mpipar.parallel.pipeline.schedule import build

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

LATER = {
    "experts", "ep", "cp", "overlap", "no-overlap", "recompute", "checkpoint",
    "save-every", "keep", "resume", "trace",
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
    schedule: Literal["naive", "gpipe", "1f1b", "interleaved", "zero-bubble"] = "1f1b"
    """Order of the micro-batches in the pipeline."""
    micro_batches: int | None = None
    """Parts into which each replica cuts its rows [default: 1 without a pipeline, else 2 x stages if that many rows]."""
    virtual_stages: int | None = None
    """Stages on each pipeline rank [default: 2 for interleaved, else 1]."""
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
    dtype: Literal["float32", "float64"] = "float32"
    """Type of parameters, activations and messages."""
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
    deterministic: bool = False
    """Sum in an order that doesn't depend on dp: dp 1, 2, 4, ... with the same dp x --micro-batches give the same bits."""
    gemm: Literal["numba", "blas"] = "numba"
    """Matrix products by mpipar's kernel, or by NumPy's BLAS."""
    threads: int | None = None
    """Threads of a rank [default: cores of the affinity mask / ranks on the node]."""
    metrics: Annotated[str | None, tyro.conf.arg(metavar="FILE")] = None
    """Write one JSON object a line: start, every step, evaluations, end (an older metrics file is replaced)."""
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
        micro = self.micro_batches
        if micro is None:
            micro = 1 if self.pp == 1 else max(min(2 * self.pp, rows), 1)
        virtual = self.virtual_stages
        if virtual is None:
            virtual = 2 if self.schedule == "interleaved" else 1
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
        if self.threads is not None and self.threads < 1:
            raise ValueError(f"--threads {self.threads} is not valid: it must be at least 1")
        if self.global_batch % self.dp:
            valid = [n for n in range(1, self.global_batch + 1) if self.global_batch % n == 0]
            raise ValueError(f"--global-batch {self.global_batch} is not divisible by dp={self.dp}: dp can be one of {valid}")
        check_deterministic(self.deterministic, self.zero, self.dp)
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
        if self.data == "random" and self.eval_every:
            raise ValueError("--eval-every needs held-out text: --data random has none")

    def _check_pipeline(self) -> None:
        """The schedule, its virtual stages and the layers have to fit."""
        if self.schedule == "interleaved" and self.virtual_stages < 2:
            raise ValueError("--schedule interleaved needs --virtual-stages of at least 2")
        if self.schedule in ("1f1b", "zero-bubble") and self.virtual_stages > 1:
            raise ValueError(f"--virtual-stages {self.virtual_stages} needs --schedule interleaved, gpipe or naive")
        stages = self.pp * self.virtual_stages
        if self.layers < stages:
            raise ValueError(f"--layers {self.layers} do not fill pp={self.pp} x {self.virtual_stages} virtual stages: "
                             f"give at least {stages} layers, or fewer stages")
        build(self.schedule, self.pp, self.micro_batches, self.virtual_stages)

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
        is_switch = isinstance(getattr(default, key.replace("-", "_")), bool)
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
    return one_line_cli(Config, arguments, prog="python -m mpipar.train", default=default)


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
