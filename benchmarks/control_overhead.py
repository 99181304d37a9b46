"""Share of a step that the simulator does not explain: P=8 emulated stages, 20 ms a microbatch and
stage, real actors, real channels, real coordinator.

The simulator is the planner's: it knows the layers' times, what a stage does beside them and how
long messages travel, all from the run's own profile. Beside it stands the share that the layers'
nominal times alone leave over.
"""

from common import arguments, figure, log, median_step_s, show, train
from emulation import emulated, nominal_s

NUM_STAGES, NUM_MICROBATCHES = 8, 16
FORWARD_S, BACKWARD_S = 0.007, 0.013
STEPS, WARMUP = 24, 4


def main() -> None:
    options = arguments(__doc__ or "")
    nominal = nominal_s("1f1b", NUM_STAGES, [NUM_MICROBATCHES], FORWARD_S, BACKWARD_S)
    shares, beyond_layers = [], []
    for _ in range(options.repeats):
        run = train(emulated("1f1b", NUM_STAGES, NUM_MICROBATCHES, FORWARD_S, BACKWARD_S, STEPS))
        measured = median_step_s(run.lines, WARMUP)
        shares.append((measured - run.predicted_step_s) / measured)
        beyond_layers.append((measured - nominal) / measured)
        log(
            f"step {1000 * measured:.1f} ms, simulator {1000 * run.predicted_step_s:.1f} ms, "
            f"layers alone {1000 * nominal:.1f} ms"
        )
    figures = {
        "unexplained_share_p8": figure(shares),
        "beyond_layers_share_p8": figure(beyond_layers),
    }
    show(figures, options.json)


if __name__ == "__main__":
    main()
