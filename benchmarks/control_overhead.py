"""Share of a step that the simulator does not explain: P=8 emulated stages, 20 ms a microbatch and
stage, real actors, real channels, real coordinator."""

from common import arguments, figure, log, median_step_s, show, train
from emulation import emulated, predicted_s

NUM_STAGES, NUM_MICROBATCHES = 8, 16
FORWARD_S, BACKWARD_S = 0.007, 0.013
STEPS, WARMUP = 16, 4


def main() -> None:
    options = arguments(__doc__ or "")
    expected = predicted_s("1f1b", NUM_STAGES, [NUM_MICROBATCHES], FORWARD_S, BACKWARD_S)
    shares = []
    for _ in range(options.repeats):
        lines = train(emulated("1f1b", NUM_STAGES, NUM_MICROBATCHES, FORWARD_S, BACKWARD_S, STEPS))
        measured = median_step_s(lines, WARMUP)
        shares.append((measured - expected) / measured)
        log(f"step {1000 * measured:.1f} ms, simulator {1000 * expected:.1f} ms")
    show({"unexplained_share_p8": figure(shares)}, options.json)


if __name__ == "__main__":
    main()
