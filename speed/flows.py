"""Speed, accuracy and memory of the stacked flows beside a Python loop over nflows' flows.

    python speed/flows.py            training, scoring and accuracy beside the loop (about 3 minutes)
    python speed/flows.py --paper    the paper's shape: 100 classes, 640 features, 500 samples a class, to the end, with
                                     the defaults and (3 minutes) with the paper's setting

Every ratio comes from one run: the sides take turns and the best of several counts. Timings of a single side are shown
only so that the ratio can be judged. The loop is what one would write with nflows: a flow and an AdamW per class, with
the same start, the same batches and the same validation split as the stack.
"""

import argparse
import resource
import time
from collections.abc import Callable

import torch
from nflows.flows import Flow
from torch import Tensor
from torch.func import functional_call, stack_module_state, vmap

from rmd_plugin import FlowLikelihood, RelativeFlow
from rmd_plugin.detectors.flows import FlowBank, FlowSpec, FlowTraining, Parameters, split_rows, train_flows

#: samples that are scored at a time
PASS_SAMPLES = 256


def take_turns(sides: list[Callable[[], object]], rounds: int) -> list[float]:
    """Best time of each side, in seconds, taking turns so that all meet the same load of the machine."""
    best = [float("inf")] * len(sides)
    for _ in range(rounds):
        for side, action in enumerate(sides):
            start = time.perf_counter()
            action()
            best[side] = min(best[side], time.perf_counter() - start)
    return best


def curved(width: int, classes: int, per_class: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Classes that no shared Gaussian fits, (N, D) and (N,).

    Every second feature bends with the one before, and a feature varies more in some classes than in others, as the
    units of penultimate layers do.
    """
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    y = torch.arange(classes * per_class) % classes
    z = normal(len(y), width)
    z[:, 1::2] += 0.7 * (z[:, : 2 * (width // 2) : 2].square() - 1)
    z *= (0.4 * normal(classes, width)).exp()[y]
    mix = torch.eye(width) + 0.2 * normal(width, width) / width**0.5
    return (z + normal(classes, width)[y]) @ mix, y


def loop(spec: FlowSpec, x: Tensor, y: Tensor, classes: int, options: FlowLikelihood) -> list[float]:
    """Train one nflows flow after the other; the best validation loss of each."""
    losses = []
    for label in range(classes):
        rows = (y == label).nonzero().flatten()
        training, validation, generator = split_rows(rows, options, label)
        flow = spec.build(options.seed)
        weights = [p for p in flow.parameters() if p.ndim > 1]
        biases = [p for p in flow.parameters() if p.ndim == 1]
        groups = [{"params": weights}, {"params": biases, "weight_decay": 0.0}]
        optimizer = torch.optim.AdamW(groups, lr=options.lr, weight_decay=options.weight_decay)
        with torch.no_grad():
            best = float(-flow.log_prob(x[validation]).mean())
        steps = -(-len(training) // options.batch_size)
        for _ in range(options.max_epochs):
            order = training[torch.randperm(len(training), generator=generator)]
            for step in range(steps):
                batch = order[step * len(order) // steps : (step + 1) * len(order) // steps]
                optimizer.zero_grad()
                (-flow.log_prob(x[batch]).mean()).backward()
                optimizer.step()
            with torch.no_grad():
                best = min(best, float(-flow.log_prob(x[validation]).mean()))
        losses.append(best)
    return losses


def training(rounds: int) -> str:
    classes, width, per_class = 100, 64, 100
    z, y = curved(width, classes, per_class)
    x = z - torch.stack([z[y == k].mean(0) for k in range(classes)])[y]
    x = x / x.std(0)
    # the detector's defaults for 64 features; enough patience that both sides run all epochs
    spec, options = FlowSpec(width, 64), FlowLikelihood(max_epochs=5, patience=100)
    found: dict[str, FlowTraining | list[float]] = {}

    def stack() -> None:
        found["stack"] = train_flows(spec, x, y, classes, options)

    def one_by_one() -> None:
        found["loop"] = loop(spec, x, y, classes, options)

    train_flows(spec, x, y, classes, FlowLikelihood(max_epochs=1))
    fast, slow = take_turns([stack, one_by_one], rounds)
    ours, theirs = found["stack"].loss.double(), torch.tensor(found["loop"], dtype=torch.float64)
    difference = float(((ours - theirs) / theirs).abs().max())
    at = f"K={classes} D={width}, {per_class} samples a class, {options.max_epochs} epochs"
    return (
        f"| training vs a loop of nflows flows | {at} | {fast:.2f} s vs {slow:.2f} s | **{slow / fast:.1f}x** |\n"
        f"| largest relative difference of the losses | the same | {difference:.1e} | |"
    )


def bent(spec: FlowSpec, classes: int) -> Parameters:
    """Parameters far from the start, so that every term of a density is at work."""
    generator = torch.Generator().manual_seed(0)
    params, masks = spec.stack(classes), spec.masks()
    for name, value in params.items():
        value += 0.05 * torch.randn(value.shape, generator=generator)
        if name in masks:
            value *= masks[name]
    return params


@torch.no_grad()
def scoring(classes: int, width: int, hidden: int, samples: int, rounds: int) -> str:
    spec = FlowSpec(width, hidden)
    params = bent(spec, classes)
    centres, u = torch.randn(classes, width), 2 * torch.randn(samples, width)
    bank = FlowBank(spec, params, centres)
    flows = [spec.unstack(params, k) for k in range(classes)]
    stacked, buffers = stack_module_state([_LogProb(flow) for flow in flows])
    shell = _LogProb(spec.build()).to("meta")

    def folded() -> Tensor:
        return torch.cat([bank(part) for part in u.split(PASS_SAMPLES)])

    def one_by_one() -> Tensor:
        return torch.stack([flow.log_prob(u - centres[k]) for k, flow in enumerate(flows)], dim=1)

    def plain_vmap() -> Tensor:
        each = vmap(lambda p, b, c, v: functional_call(shell, (p, b), (v - c,)), in_dims=(0, 0, 0, None))
        return torch.cat([each(stacked, buffers, centres, part).T for part in u.split(PASS_SAMPLES)])

    reference = one_by_one()
    difference = float(((folded() - reference) / reference).abs().max())
    fast, slow, middle = take_turns([folded, one_by_one, plain_vmap], rounds)
    at = f"K={classes} D={width} H={hidden}, {samples:,} samples"
    return (
        f"| scoring vs the loop | {at} | {fast:.2f} s vs {slow:.2f} s | **{slow / fast:.1f}x** |\n"
        f"| scoring vs plain `vmap`, {PASS_SAMPLES} samples at a time | the same | {fast:.2f} s vs {middle:.2f} s | "
        f"{middle / fast:.1f}x |\n"
        f"| largest relative difference to `Flow.log_prob` | the same | {difference:.1e} | |"
    )


class _LogProb(torch.nn.Module):
    def __init__(self, flow: Flow) -> None:
        super().__init__()
        self.flow = flow

    def forward(self, value: Tensor) -> Tensor:
        return self.flow.log_prob(value)


def fit(**setting: str) -> str:
    z, y = curved(640, 100, 500)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    start, used = time.perf_counter(), time.process_time()
    detector = RelativeFlow(**setting).fit_features(z, y)
    seconds, used = time.perf_counter() - start, time.process_time() - used
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    report = detector.training_report()
    epochs = sorted(row["epoch"] for row in report)
    nats = "; ".join(f"{row['gaussian']:.1f} -> {row['trained']:.1f}" for row in (report[0], report[-1]))
    start = time.perf_counter()
    detector.predict_features(z[:1000])
    scoring_seconds = time.perf_counter() - start
    given = ", ".join(f'{name}="{value}"' for name, value in setting.items())
    at = "K=100 D=640, 500 samples a class"
    return (
        f"| `RelativeFlow({given}).fit_features` to early stopping | {at} | {seconds:.0f} s ({used:.0f} s of CPU "
        f"time), peak {peak:.1f} GiB of the process ({before:.1f} GiB before) | |\n"
        f"| best epochs of its {len(report)} flows | the same | {epochs[0]} to {epochs[-1]} | |\n"
        f"| held-out nats of its first and its last flow, Gaussian -> trained | the same | {nats} | |\n"
        f"| scoring 1,000 samples | the same | {scoring_seconds:.1f} s | |"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--paper", action="store_true", help="fit the paper's shape to early stopping instead")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    torch.manual_seed(0)
    print(f"torch {torch.__version__}, {arguments.threads} threads\n")
    print("| what | at | measured | ratio |\n|---|---|---|---|")
    if arguments.paper:
        print(fit(), flush=True)
        print(fit(space="features", background="flow", sharing="per_class"))
        return
    print(training(arguments.rounds), flush=True)
    print(scoring(100, 64, 64, 10_000, arguments.rounds), flush=True)
    print(scoring(100, 640, 128, 1_000, arguments.rounds), flush=True)


if __name__ == "__main__":
    main()
