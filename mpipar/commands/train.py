"""The command `mpipar.train`: set a run up, train, report."""

from __future__ import annotations

import dataclasses
import math
import os
import platform
import sys
import time
from contextlib import nullcontext
from dataclasses import dataclass

import numpy as np

import mpipar
from mpipar.comm import fault, guard
from mpipar.comm.mesh import Mesh
from mpipar.comm.mpi import check_launcher, library, world_size
from mpipar.commands.config import Config, parse
from mpipar.commands.report import Progress, plan_lines
from mpipar.data import RandomTokens, RandomVectors, TextVectors, TextWindows, load_text, split_text
from mpipar.engine.balance import Balance, by_flops, by_measurement
from mpipar.engine.bubble import BubbleMeter, predicted_bubble
from mpipar.engine.checksum import parameters_sha256
from mpipar.engine.generate import generate
from mpipar.engine.learning_rate import Cosine
from mpipar.engine.metrics import MetricsFile, Throughput, check_folder, check_writable, peak_rss_bytes
from mpipar.engine.optimizer import SGD, AdamW
from mpipar.engine.trainer import Trainer
from mpipar.kernels.cache import is_cold
from mpipar.kernels.dtypes import as_dtype
from mpipar.kernels.settings import settings
from mpipar.kernels.threads import limit_threads
from mpipar.models.gpt import GPT
from mpipar.models.mlp import MLP
from mpipar.models.model import Chunk
from mpipar.parallel.overlap import OverlappingReducer
from mpipar.parallel.pipeline.measure import Measurement, gather
from mpipar.parallel.pipeline.picture import draw, has_matplotlib
from mpipar.parallel.pipeline.schedule import placement
from mpipar.parallel.pipeline.sleeping import sleeping_chunks
from mpipar.parallel.pipeline.trace import write_trace


@dataclass
class Run:
    """Everything that a configuration asks for, built and checked."""

    config: Config
    mesh: Mesh
    train: object  # source of the training batches
    held_out: object | None  # source of the evaluation batches
    trainer: Trainer
    metrics: MetricsFile
    prompt: np.ndarray | None  # text to continue at the end
    balance: Balance | None = None  # how the layers were divided, if not by count


def main(arguments: list[str]) -> int:
    """The command: see `Config` for the options."""
    fault.inject("import")
    return train(set_up(arguments))


def set_up(arguments: list[str]) -> Run:
    """Build a run from the command line; whatever a user can get wrong is refused here, before memory is taken."""
    with guard.checking():
        check_launcher()
        asked = parse(arguments)
        config = asked.resolved(world_size())
        enough_ranks(asked, world_size())
        mesh = Mesh(dp=asked.dp, tp=config.tp, pp=config.pp, order=config.axes(), back_end=config.comm)
        config.check()
        if config.overlap and config.dp > 1:
            mesh.check_several_threads()
        check_metrics(config)
        check_folder("--trace", config.trace)
        train_source, held_out, prompt = sources(config)
        limit_threads(config.threads or max(1, settings.threads // mesh.ranks_on_node))
        settings.gemm = config.gemm
        model, balance = build_model(config, mesh), None
        if config.balance == "flops":
            balance = by_flops(model, config.plan())
            model = build_model(config, mesh, balance)
        model.check_memory(config.zero)
        if mesh.is_root and not config.quiet and is_cold():
            print("compiling the kernels: once for this machine, up to a minute", flush=True)
        if config.balance == "measured":
            warm = Trainer(model.allocate(), SGD(), schedule=config.plan(), micro_batches=config.micro_batches, overlap=False)
            balance = by_measurement(warm, train_source.batch(1))
            del model, warm  # its memory goes before the new one's is taken
            model = build_model(config, mesh, balance)
        model.allocate(zero=config.zero)
        if config.stage_delay is not None:
            model.chunks = sleeping_chunks(model.stage_blocks, model.placement, mesh.pp.rank, config.stage_delay / 1e3, model.dtype)
        kind = AdamW if config.optimizer == "adamw" else SGD
        options = {"betas": (config.beta1, config.beta2)} if config.optimizer == "adamw" else {}
        trainer = Trainer(
            model, kind(lr=config.lr, weight_decay=config.weight_decay, **options), schedule=config.plan(),
            micro_batches=config.micro_batches, clip=config.clip,
            learning_rate=Cosine(config.lr, config.warmup, config.steps, config.lr_min), zero=config.zero,
            deterministic=config.deterministic, overlap=config.overlap, bucket_mb=config.bucket_mb, compress=config.compress,
        )
        metrics = MetricsFile(config.metrics, active=mesh.is_root)
    return Run(config, mesh, train_source, held_out, trainer, metrics, prompt, balance)


def enough_ranks(asked: Config, ranks: int) -> None:
    """ValueError that says how to start, where one rank is asked to be several."""
    wanted = (asked.dp or 1) * (asked.tp or 1) * asked.pp
    if ranks == 1 and wanted > 1:
        raise ValueError(f"this layout needs {wanted} ranks, and one was started: use mpirun -np {wanted} python -m mpipar.train")


def check_metrics(config: Config) -> None:
    """ValueError if the metrics can't be written, or would replace something else than older metrics."""
    check_writable(config.metrics)
    if config.metrics is None or not os.path.exists(config.metrics) or not os.path.getsize(config.metrics):
        return
    with open(config.metrics, "rb") as file:
        if not file.readline(64).startswith(b'{"event": '):
            raise ValueError(f"--metrics {config.metrics!r} exists and is not a metrics file: it would be replaced")


def build_model(config: Config, mesh: Mesh, balance: Balance | None = None) -> GPT | MLP:
    """The model of a configuration on a mesh, without memory yet."""
    per_stage = config.stage_layers() if balance is None else balance.layers_per_stage
    common = dict(
        layers=config.layers, dim=config.dim, mesh=mesh, dtype=config.dtype, seed=config.seed,
        placement=placement(config.plan()), recompute=config.recompute, layers_per_stage=per_stage, allocate=False,
    )
    if config.model == "mlp":
        return MLP(**common)
    return GPT(heads=config.heads, vocab=config.vocab, seq=config.seq, tied=config.tied, dropout=config.dropout, **common)


def sources(config: Config):
    """(training source, held-out source or None, prompt or None) of a configuration."""
    common = dict(global_batch=config.global_batch, seed=config.seed)
    if config.data == "random":
        if config.model == "mlp":
            return RandomVectors(dim=config.dim, dtype=as_dtype(config.dtype), **common), None, None
        return RandomTokens(vocab=config.vocab, seq=config.seq, **common), None, None
    tokens = load_text(config.data)
    if config.model == "gpt" and tokens.max() >= config.vocab:
        raise ValueError(f"--vocab {config.vocab} is too small: the text has the byte {tokens.max()}, so at least {tokens.max() + 1}")
    train_part, tail = split_text(tokens, config.held_out)

    def source(part, name, drop_last):
        try:
            if config.model == "mlp":
                return TextVectors(part, dim=config.dim, dtype=as_dtype(config.dtype), drop_last=drop_last, **common)
            return TextWindows(part, seq=config.seq, drop_last=drop_last, **common)
        except ValueError as error:
            raise ValueError(f"the {name} part of --data {config.data} (--held-out {config.held_out}): {error}") from None

    held_out = source(tail, "held-out", False) if config.eval_steps and len(tail) else None
    return source(train_part, "training", True), held_out, tail[:32].astype(np.int64) if config.model == "gpt" and len(tail) else None


def train(run: Run) -> int:
    """The loop over the steps, evaluations, and what is said and written on the way; the exit code."""
    config, mesh, trainer = run.config, run.mesh, run.trainer
    speak = mesh.is_root and not config.quiet
    if speak:
        if config.stage_delay is not None:
            print(f"each stage sleeps {config.stage_delay:g} ms forward and {config.stage_delay:g} ms backward: nothing is computed, "
                  "losses are 0 and the weights mean nothing")
        print("\n".join(plan_lines(
            trainer.model, batch=config.global_batch, micro_batches=config.micro_batches, schedule=config.schedule,
            threads=settings.threads, gemm=settings.gemm, zero=config.zero, trainer=trainer)), flush=True)
        if run.balance:
            print(f"balance   {run.balance}", flush=True)
    write_start(run)
    first = run.train.batch(1)
    unit = "tokens" if first.tokens else "samples"
    throughput = Throughput(first.tokens or first.size)
    progress, bubble, sent = Progress(config.steps, active=speak, unit=unit), BubbleMeter(), {}
    mesh.world.barrier()
    for step in range(1, config.steps + 1):
        started = time.perf_counter()
        with mesh.record() if step == 1 else nullcontext() as log:  # every step sends the same
            fault.inject("data", step=step, rank=mesh.rank)
            result = trainer.step(run.train.batch(step))
        seconds = time.perf_counter() - started
        rate = throughput.add(seconds)
        bubble.add(trainer)
        if log is not None:
            by_group = log.sent(by="group")
            sent = {axis: by_group.get(axis, 0) for axis in ("tp", "pp", "dp")}
        run.metrics.write("step", step=step, loss=result.loss, grad_norm=result.grad_norm, lr=result.lr,
                          step_time_s=seconds, **{f"{unit}_per_s": rate})
        progress.step(result, rate)
        if not math.isfinite(result.loss):
            progress.close()
            if mesh.is_root:
                print(f"mpipar: error: the loss of step {step} is {result.loss}: training has diverged; lower --lr", file=sys.stderr)
            return 1
        if result.stop:
            progress.say(f"asked to stop: leaving after step {step}")
            break
        if config.eval_every and step % config.eval_every == 0 and step < config.steps:
            evaluate(run, progress)
    final = evaluate(run, progress)
    progress.close()
    write_end(run, throughput, bubble, sent, unit, final, speak)
    if run.prompt is not None and config.generate and config.stage_delay is None:
        sample(run, speak)
    run.metrics.close()
    return 0


def evaluate(run: Run, progress: Progress) -> float | None:
    """The loss over the held-out batches, said and written; None if there are none."""
    if run.held_out is None or run.config.stage_delay is not None:
        return None
    batches = (run.held_out.batch(k) for k in range(1, run.config.eval_steps + 1))
    loss = run.trainer.evaluate(batches)
    run.metrics.write("eval", step=run.trainer.steps_done, loss=loss)
    progress.say(f"evaluation after step {run.trainer.steps_done}: held-out loss {loss:.4f}")
    return loss


def sample(run: Run, speak: bool) -> None:
    """Let the first replica continue the beginning of the held-out text, and print it."""
    if run.mesh.dp.rank == 0:
        tokens = generate(run.trainer.model, run.prompt, run.config.generate, seed=run.config.seed)
        if speak:
            start, rest = (printable(part) for part in np.split(tokens, [len(run.prompt)]))
            print(f"generated text, after {start!r}:\n{rest}", flush=True)
    run.mesh.world.barrier()


def printable(tokens: np.ndarray) -> str:
    """Bytes as text that is safe for a terminal."""
    text = bytes(tokens.astype(np.uint8)).decode(errors="replace")
    return "".join(c if c.isprintable() or c in "\n\t" else "\N{REPLACEMENT CHARACTER}" for c in text)


def write_start(run: Run) -> None:
    """The first line of the metrics file: the whole configuration and where it runs."""
    mesh, reducer = run.mesh, run.trainer.gradients.reducer
    overlap = isinstance(reducer, OverlappingReducer)
    config = {**dataclasses.asdict(run.config), "overlap": overlap, "bucket_mb": reducer.bucket_mb if overlap else None}
    run.metrics.write(
        "start", **config, ranks=mesh.size, nodes=mesh.nodes, threads_per_rank=settings.threads,
        versions={"mpipar": mpipar.__version__, "numpy": np.__version__, "python": platform.python_version(), "mpi": library()},
    )


def held_bytes(trainer: Trainer) -> dict[str, list[int]]:
    """Bytes that every rank holds between steps, of parameters, gradients and the optimizer's state; collective."""
    mine = trainer.optimizer.held_bytes()
    return {name: trainer.mesh.world.all_gather(np.array([size])).tolist() for name, size in mine.items()}


def write_end(run: Run, throughput: Throughput, bubble: BubbleMeter, sent: dict, unit: str, final, speak: bool) -> None:
    """The last line of the metrics file, and the same in short on the screen; collective."""
    trainer, mesh = run.trainer, run.mesh
    digest = parameters_sha256(trainer.model)
    memory, held = peak_rss_bytes(mesh.world), held_bytes(trainer)
    activations = activation_bytes(trainer)
    measured = bubble.measured(mesh.pp)
    last_step = gather(trainer.last_run, mesh.pp) if trainer.last_run else None  # on the first stage of each pipeline
    simulated = last_step.predict(trainer.plan).bubble if last_step else None
    run.metrics.write(
        "end", steps=trainer.steps_done, parameters=trainer.model.global_parameters, parameters_sha256=digest,
        eval_loss=final, median_step_time_s=throughput.median_time(), warmup_steps_excluded=throughput.excluded,
        **{f"median_{unit}_per_s": throughput.median_rate()}, peak_rss_bytes=memory, held_bytes=held, bytes_sent=sent,
        activation_bytes=activations,
        bubble={"measured": measured, "predicted": predicted_bubble(trainer.plan), "last_step_measured": last_step and last_step.bubble,
                "last_step_simulated": simulated},
    )
    if speak:
        bytes_sent = ", ".join(f"{axis} {count:,.0f}" for axis, count in sent.items() if count)
        print(f"{trainer.steps_done} steps, median {throughput.median_time() * 1e3:.1f} ms, {throughput.median_rate():,.0f} "
              f"{unit}/s; bytes sent a step by rank 0: {bytes_sent or 'none'}; peak memory of a rank {max(memory) >> 20} MiB", flush=True)
        if run.config.recompute != "none" and activations["held"]:
            held, dropped = activations["held"], activations["dropped"]
            print(f"activations of a micro-batch, by rank: {', '.join(f'{n:,}' for n in held)} bytes held until backward, "
                  f"{', '.join(f'{n:,}' for n in dropped)} dropped and made again (--recompute {run.config.recompute})", flush=True)
        if last_step and mesh.pp.size > 1:
            print("the pipeline's last step:", *last_step.lines(trainer.plan), sep="\n", flush=True)
    if last_step and run.config.trace:
        for path in show_pipeline(run, last_step):
            if speak:
                print(f"written: {path}", flush=True)


def activation_bytes(trainer: Trainer) -> dict[str, list[int]]:
    """For each rank the bytes of one micro-batch's activations that its stages hold, and those that they drop; collective."""
    chunks = [c for c in trainer.model.chunks.values() if isinstance(c, Chunk)]  # a sleeping stage has none
    mine = np.array([[sum(c.held_bytes for c in chunks), sum(c.dropped_bytes for c in chunks)]], np.int64)
    held, dropped = trainer.mesh.world.all_gather(mine).T.tolist()
    return {"held": held, "dropped": dropped}


def show_pipeline(run: Run, measured: Measurement) -> list[str]:
    """Write the trace of a pipeline's step, and its picture where there is matplotlib; the names of the files."""
    mesh, config = run.mesh, run.config
    os.makedirs(config.trace, exist_ok=True)
    which = "".join(f"-{axis}{mesh.coordinates[axis]}" for axis in ("dp", "tp") if mesh.shape[axis] > 1)
    stem = os.path.join(config.trace, f"pipeline{which}")
    title = f"{config.schedule}, {mesh.pp.size} ranks, {config.micro_batches} micro-batches, step {run.trainer.steps_done}"
    write_trace(f"{stem}.json", measured, title=title)
    if not has_matplotlib():
        return [f"{stem}.json"]
    draw(f"{stem}.png", measured.predict(run.trainer.plan), measured, title=title)
    return [f"{stem}.json", f"{stem}.png"]

