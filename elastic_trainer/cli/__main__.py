"""`python -m elastic_trainer.cli`, the same as `elastic-trainer`."""

from elastic_trainer.cli import main

if __name__ == "__main__":
    main()
