"""Command `monitoring`: files for administrators of Prometheus, Alertmanager and Grafana."""

from __future__ import annotations

from pathlib import Path

import click

from hpctrain.page.output import say


@click.command()
@click.argument("directory", type=click.Path(path_type=Path, file_okay=False), required=False)
@click.option("--list", "only_list", is_flag=True, help="Print what would be written.")
@click.option("--force", is_flag=True, help="Replace files that have another text.")
def monitoring(directory: Path | None, only_list: bool, force: bool) -> None:
    """Write what a site needs to watch runs: alert rules, Grafana dashboards with provisioning,
    and examples for Prometheus and Alertmanager, with a README of the steps.

    \b
    Examples:
      hpctrain monitoring --list
      hpctrain monitoring monitoring
      hpctrain monitoring /etc/hpctrain-monitoring --force
    """
    from hpctrain.observe import monitoring as action

    if only_list:
        for file in action.monitoring_files():
            click.echo(directory / file.path if directory else file.path)
        return
    if directory is None:
        raise click.UsageError("Missing argument 'DIRECTORY'.")
    written = action.write_monitoring(directory, force=force)
    say(f"Wrote {len(written)} files into {directory}; README.md has the steps")
