"""Says at the end of a run how much of each full product was run."""

import pytest


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Counts travel with the reports of the tests, so workers of pytest-xdist count too."""
    reports = terminalreporter.getreports("passed")
    found = [value for report in reports for name, value in report.user_properties]
    counts = [tuple(value) for value in found if isinstance(value, list | tuple)]
    for matrix in dict.fromkeys(name for name, *_ in counts):
        # A cell that a rule of the configuration refuses, but not by its name, fails its test.
        run = sum(n for name, n, _, _ in counts if name == matrix)
        product, skipped = next(numbers for name, _, *numbers in counts if name == matrix)
        terminalreporter.write_line(f"{matrix}: run {run} of {product}, skipped by rule {skipped}")
