"""Says at the end of a run how much of the full product was run."""

import pytest


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Counts travel with the reports of the tests, so workers of pytest-xdist count too."""
    reports = terminalreporter.getreports("passed")
    found = [value for report in reports for name, value in report.user_properties]
    counts = [tuple(value) for value in found if isinstance(value, list | tuple)]
    if counts:
        run, (_, product) = sum(n for n, _ in counts), counts[0]
        # A cell that a rule of the configuration refuses would have failed its test.
        terminalreporter.write_line(f"tensor parallel: run {run} of {product}, skipped by rule 0")
