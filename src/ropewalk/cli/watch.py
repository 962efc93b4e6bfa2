"""``ropewalk watch``: show how far a run has come, while it trains."""

from __future__ import annotations

import time

from ropewalk.cli.binding import UsageError, make_command
from ropewalk.cli.output import JsonFlag, Terminal, print_json, results, show
from ropewalk.training.so_far import WatchSettings


def watch(settings: WatchSettings, *, as_json: JsonFlag = False) -> None:
    """Show a run while it trains: loss, speed, memory, scores so far and the time left.

    Only reads the run's folder, which may be on a file system that another machine writes to. Ends with the run; Ctrl-C
    ends it earlier, and does not touch the run.
    """
    from ropewalk.reporting.run.watched import describe_watched, write_watched_page
    from ropewalk.training.so_far import so_far

    if settings.page is not None and settings.page.suffix != ".html":
        raise UsageError(f"--page must name an .html file, got {settings.page}")
    seen = Terminal().is_terminal
    # A page is looked at in a browser, wherever the command's own output goes.
    once = settings.once or as_json or not (seen or settings.page is not None)
    while True:
        found = so_far(settings.run)
        if settings.page is not None:
            write_watched_page(found, settings.page, settings.every)
        if as_json:
            print_json(found.to_json())
        else:
            if seen and not once:
                results().clear()
            if seen or once or found.state == "finished":
                show(describe_watched(found))
        if once or found.state == "finished" or not _wait(settings.every):
            break
    if settings.page is not None and not as_json:
        results().say(f"page  {settings.page}")


def _wait(seconds: float) -> bool:
    """Sleep until the next look; False on Ctrl-C, which is the usual end."""
    try:
        time.sleep(seconds)
    except KeyboardInterrupt:
        return False
    return True


app = make_command(watch, "watch", "ropewalk watch runs/llama-64k --page watch.html")
