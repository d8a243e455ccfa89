"""The plot of docs/simulation.md: ETTR over the checkpoint interval for 512 to 16,384 GPUs.

    python -m bench.simulate_plots [--trials 40] [--out docs/images]

Belongs here: drawing. Does not belong here: playing (`hpctrain.simulate`).
"""

from __future__ import annotations

import argparse
from pathlib import Path

import matplotlib as mpl

from bench.simulate_published import settings
from hpctrain.plan.forecast.intervals import daly_seconds
from hpctrain.simulate.monte_carlo import simulate
from hpctrain.simulate.scenario import Scenario

mpl.use("Agg")
from matplotlib import pyplot as plt

# GPUs -> (spare nodes of the solid line, colour)
SIZES = {
    512: (2, "#0072B2"),
    2048: (4, "#009E73"),
    8192: (8, "#E69F00"),
    16384: (16, "#D55E00"),
}
MINUTES = (2, 3, 5, 8, 12, 20, 30, 45, 60, 90, 120)


def scenario(gpus: int, spare_nodes: int, minutes: float) -> Scenario:
    """20 days; 6.5 failures per 1000 node-days; 5 s stall; an hour in the queue."""
    return Scenario(
        nodes=gpus // 8,
        spare_nodes=spare_nodes,
        work_seconds=20 * 86400.0,
        step_seconds=10.0,
        interval_seconds=minutes * 60,
        save_stall_seconds=5.0,
        save_write_seconds=60.0,
        failures_per_node_day=6.5e-3,
        restart_seconds=300.0,
        queue_wait_seconds=3600.0,
        supervise=settings(),
    )


def draw(trials: int, path: Path) -> None:
    figure, axes = plt.subplots(figsize=(7.2, 4.4))
    for gpus, (spares, colour) in SIZES.items():
        for count, style in ((spares, "-"), (0, ":")):
            ratios = [simulate(scenario(gpus, count, m), trials, 1).ettr for m in MINUTES]
            words = f"{count} spare nodes" if count else "no spare nodes"
            axes.plot(
                MINUTES,
                [ratio.mean for ratio in ratios],
                style,
                color=colour,
                label=f"{gpus:,} GPUs, {words}",
            )
            axes.fill_between(
                MINUTES,
                [ratio.p5 for ratio in ratios],
                [ratio.p95 for ratio in ratios],
                color=colour,
                alpha=0.12,
                linewidth=0,
            )
        best = daly_seconds(5.0, scenario(gpus, 0, 10).mttf_seconds) / 60
        axes.axvline(best, color=colour, linewidth=0.8, linestyle="--", alpha=0.6)
    axes.set_xscale("log")
    axes.set_xticks(MINUTES, [str(m) for m in MINUTES])
    axes.minorticks_off()
    axes.set_xlabel("minutes between checkpoints (dashed: Daly)")
    axes.set_ylabel("ETTR with queue (band: 5 to 95 % of the runs)")
    axes.set_ylim(0.2, 1.0)
    axes.grid(alpha=0.25)
    axes.legend(fontsize=7, loc="lower left", ncols=2)
    figure.tight_layout()
    figure.savefig(path, dpi=130)
    plt.close(figure)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--trials", type=int, default=40)
    parser.add_argument("--out", type=Path, default=Path("docs/images"))
    given = parser.parse_args()
    draw(given.trials, given.out / "simulation-ettr.png")


if __name__ == "__main__":
    main()
