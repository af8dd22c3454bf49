"""Says at the end of a run how many of all cases of attention were run."""

import pytest


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    reports = terminalreporter.getreports("passed")
    named = [dict(report.user_properties) for report in reports]
    found = [x["exchanges"] for x in named if "exchanges" in x]
    if found:
        run, product = sum(x["run"] for x in found), found[0]["of"]
        terminalreporter.write_line(f"context exchanges: run {run} of {product}")
