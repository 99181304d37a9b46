"""Generated files are up to date, and keys do not change unnoticed."""

import subprocess
import sys
from pathlib import Path

from elastic_trainer.config.reference import configuration_page, default_yaml
from elastic_trainer.config.tree import leaf_fields, leaf_types, type_name

ROOT = Path(__file__).parents[3]
GOLDEN = ROOT / "tests" / "golden" / "config_keys.txt"


def test_configuration_page_is_up_to_date() -> None:
    page = (ROOT / "docs" / "configuration.md").read_text(encoding="utf-8")
    assert page == configuration_page(), (
        "python -m elastic_trainer.config docs > docs/configuration.md"
    )
    assert all(f"| `{path}` |" in page for path in leaf_types())


def test_default_yaml_is_up_to_date() -> None:
    text = (ROOT / "configs" / "default.yaml").read_text(encoding="utf-8")
    assert text == default_yaml(), (
        "python -m elastic_trainer.config defaults > configs/default.yaml"
    )


def test_keys_are_the_golden_ones() -> None:
    keys = [f"{path}: {type_name(hint)}" for path, hint in leaf_types().items()]
    assert GOLDEN.read_text(encoding="utf-8").splitlines() == keys, (
        "settings are an interface: update tests/golden/config_keys.txt, the changelog and "
        "the generated files together"
    )


def test_every_setting_is_explained() -> None:
    for path, item, _ in leaf_fields():
        assert item.metadata["doc"].endswith("."), path


def test_the_module_prints_pages_and_refuses_others() -> None:
    command = [sys.executable, "-m", "elastic_trainer.config"]
    done = subprocess.run([*command, "defaults"], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (0, default_yaml())
    wrong = subprocess.run([*command, "novel"], capture_output=True, text=True, timeout=60)
    assert wrong.returncode != 0 and "usage" in wrong.stderr
