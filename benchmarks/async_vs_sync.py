"""Asynchronous 1F1B with weight stashing over synchronous 1F1B on emulated layers: P=4, batches of
8 microbatches, and both against the simulator. The limit is (8 + 3) / 8 = 1.375."""

from common import arguments, figure, log, show, train
from emulation import emulated, predicted_s

NUM_STAGES, NUM_MICROBATCHES = 4, 8
FORWARD_S, BACKWARD_S = 0.010, 0.020
COMMIT_EVERY = 150  # what the trainer chooses itself for four stages
SYNC_STEPS, WARMUP = 24, 4


def synchronous() -> float:
    """Seconds per microbatch."""
    lines = train(emulated("1f1b", NUM_STAGES, NUM_MICROBATCHES, FORWARD_S, BACKWARD_S, SYNC_STEPS))
    elapsed = lines[-1]["time"] - lines[WARMUP - 1]["time"]
    return float(elapsed) / ((SYNC_STEPS - WARMUP) * NUM_MICROBATCHES)


def asynchronous() -> float:
    """Seconds per microbatch, the drains included; the first segment warms up."""
    lines = train(emulated("async_1f1b", NUM_STAGES, 1, FORWARD_S, BACKWARD_S, 3 * COMMIT_EVERY))
    elapsed = lines[-1]["time"] - lines[COMMIT_EVERY - 1]["time"]
    return float(elapsed) / (2 * COMMIT_EVERY)


def main() -> None:
    options = arguments(__doc__ or "")
    group = [NUM_MICROBATCHES]
    expected_sync = predicted_s("1f1b", NUM_STAGES, group, FORWARD_S, BACKWARD_S) / sum(group)
    group = [1] * COMMIT_EVERY
    expected_async = predicted_s("async_1f1b", NUM_STAGES, group, FORWARD_S, BACKWARD_S) / len(
        group
    )
    sync, late = [], []
    for _ in range(options.repeats):
        sync.append(synchronous())
        late.append(asynchronous())
        log(f"1f1b {1000 * sync[-1]:.2f}, async {1000 * late[-1]:.2f} ms a microbatch")
    show(
        {
            "async_over_onef1b_p4": figure([s / a for s, a in zip(sync, late, strict=True)]),
            "async_p4_over_predicted": figure([a / expected_async for a in late]),
            "onef1b_p4_over_predicted": figure([s / expected_sync for s in sync]),
        },
        options.json,
    )


if __name__ == "__main__":
    main()
