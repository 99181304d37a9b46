"""Asynchronous 1F1B with weight stashing over synchronous 1F1B on emulated layers: P=4, batches of
8 microbatches, and both against the simulator. The limit is (8 + 3) / 8 = 1.375."""

from common import arguments, figure, log, show, train
from emulation import emulated

NUM_STAGES, NUM_MICROBATCHES = 4, 8
FORWARD_S, BACKWARD_S = 0.010, 0.020
COMMIT_EVERY = 150  # what the trainer chooses itself for four stages
SYNC_STEPS, WARMUP = 24, 4


def synchronous() -> tuple[float, float]:
    """Seconds per microbatch, measured and predicted by the run's plan."""
    run = train(emulated("1f1b", NUM_STAGES, NUM_MICROBATCHES, FORWARD_S, BACKWARD_S, SYNC_STEPS))
    elapsed = run.lines[-1]["time"] - run.lines[WARMUP - 1]["time"]
    measured = float(elapsed) / ((SYNC_STEPS - WARMUP) * NUM_MICROBATCHES)
    return measured, run.predicted_step_s / NUM_MICROBATCHES


def asynchronous() -> tuple[float, float]:
    """The same, the drains included; the first segment warms up."""
    run = train(emulated("async_1f1b", NUM_STAGES, 1, FORWARD_S, BACKWARD_S, 3 * COMMIT_EVERY))
    elapsed = run.lines[-1]["time"] - run.lines[COMMIT_EVERY - 1]["time"]
    return float(elapsed) / (2 * COMMIT_EVERY), run.predicted_step_s


def main() -> None:
    options = arguments(__doc__ or "")
    sync, late = [], []
    for _ in range(options.repeats):
        sync.append(synchronous())
        late.append(asynchronous())
        log(
            "milliseconds a microbatch, measured and predicted: "
            f"1f1b {1000 * sync[-1][0]:.2f} {1000 * sync[-1][1]:.2f}, "
            f"async {1000 * late[-1][0]:.2f} {1000 * late[-1][1]:.2f}"
        )
    show(
        {
            "async_over_onef1b_p4": figure(
                [s / a for (s, _), (a, _) in zip(sync, late, strict=True)]
            ),
            "async_p4_over_predicted": figure([a / expected for a, expected in late]),
            "onef1b_p4_over_predicted": figure([s / expected for s, expected in sync]),
        },
        options.json,
    )


if __name__ == "__main__":
    main()
