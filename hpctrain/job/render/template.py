"""Fills the job template: the packaged one, or one of the site that extends or replaces it.

Belongs here: where templates are found, what they may use, and errors with file and line. Does not
belong here: the values (see `script`), and what a site may change (docs/templates.md).
"""

from __future__ import annotations

import functools
import os
import traceback
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from hpctrain.base.errors import InvalidInputError, Problem
from hpctrain.base.printable_text import printable_line
from hpctrain.job.render.quoting import sh, sh_expanded
from hpctrain.job.render.script import Script

if TYPE_CHECKING:
    from jinja2 import BaseLoader, Environment

TEMPLATE = "job.sbatch.j2"
# `hpctrain/job.sbatch.j2` is the packaged template, whatever a site's directory contains.
PACKAGED = "hpctrain"
# Without them there is no warning before the time limit, or a requeued job loses its log.
_NEEDED = ("--signal", "--open-mode", "--requeue", "--no-requeue")
_FORMER_NAME = "sbatch/megatron.sbatch.j2"


@dataclass(frozen=True)
class ServiceWords:
    """What the template of a service's job has beside the values of every job."""

    service_id: str
    progress_words: str


def render_script(script: Script, template_directory: Path | None = None) -> str:
    """Render the job script, with `job.sbatch.j2` of `template_directory` if one is given.

    Raises InvalidInputError for a directory without that file, and for a mistake in it.
    """
    return render_template(TEMPLATE, template_directory, script)


def render_service_script(
    part: Literal["replica", "router"],
    script: Script,
    words: ServiceWords,
    template_directory: Path | None,
) -> str:
    """Render the script of a job of a service, whose template has `words` under the name `part`."""
    return render_template(
        f"{PACKAGED}/{part}.sbatch.j2", template_directory, script, **{part: words}
    )


def render_template(
    name: str, template_directory: Path | None, script: Script, **more: object
) -> str:
    """Render a template by its name; `more` are values besides `script`. Raises as above."""
    from jinja2 import FileSystemLoader

    if template_directory is None:
        return _packaged_environment().get_template(name).render(script=script, **more)
    site = FileSystemLoader(template_directory)
    environment = template_environment(site)
    _refuse_missing(template_directory, site, environment)
    try:
        return environment.get_template(name).render(script=script, **more)
    except InvalidInputError:
        raise  # a value that no shell can take: not the template's mistake
    except Exception as error:  # a template can raise anything, such as ZeroDivisionError
        raise InvalidInputError([_template_problem(error, template_directory)]) from error


def refuse_dropped_directives(script: Script, text: str, directory: Path) -> None:
    """Raise InvalidInputError for a template of the site without what the supervisor relies on."""
    lines = {line.removeprefix("#SBATCH").strip() for line in text.splitlines()}
    dropped = [
        directive
        for directive in script.directives
        if directive.partition("=")[0] in _NEEDED and directive not in lines
    ]
    if dropped:
        message = f"this template drops {', '.join(dropped)}, which the supervisor relies on"
        hint = "keep `{{ super() -}}` in the block `directives`"
        raise InvalidInputError([Problem(message, str(directory / TEMPLATE), hint=hint)])


@functools.cache
def _packaged_environment() -> Environment:
    """Build the environment without a site's templates once: it keeps what it has compiled."""
    return template_environment()


def template_environment(site: BaseLoader | None = None) -> Environment:
    """Build jinja2's environment for the packaged templates and those of a site."""
    from jinja2 import ChoiceLoader, Environment, PackageLoader, PrefixLoader, StrictUndefined

    class JobTemplates(Environment):
        """A template that extends its own name gets the packaged one, not itself."""

        def join_path(self, template: str, parent: str) -> str:
            return f"{PACKAGED}/{template}" if template == parent else template

    packaged = PackageLoader("hpctrain", "templates")
    environment = JobTemplates(
        loader=ChoiceLoader([PrefixLoader({PACKAGED: packaged}), site or packaged]),
        undefined=StrictUndefined,
        autoescape=False,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters["sh"] = sh
    environment.filters["sh_expanded"] = sh_expanded
    environment.filters["printable_line"] = printable_line
    return environment


def _refuse_missing(directory: Path, site: BaseLoader, environment: Environment) -> None:
    """Raise InvalidInputError where the directory has no `job.sbatch.j2` that could be used."""
    from jinja2 import TemplateNotFound

    def has(name: str) -> bool:
        try:
            site.get_source(environment, name)
        except TemplateNotFound:
            return False
        except (OSError, UnicodeDecodeError):
            pass  # rendering reads it again, and reports why it cannot
        return True

    if has(TEMPLATE):
        return
    hint = f"`{{% extends 'hpctrain/{TEMPLATE}' %}}` and the blocks that differ: docs/templates.md"
    for former in (_FORMER_NAME, Path(_FORMER_NAME).name):
        if has(former):
            message = f"no longer read: the job template is called {TEMPLATE} now"
            raise InvalidInputError([Problem(message, str(directory / former), hint=hint)])
    message = f"this template directory has no {TEMPLATE}"
    raise InvalidInputError([Problem(message, str(directory), hint=hint)])


def _template_problem(error: Exception, directory: Path) -> Problem:
    """Describe an error with the file and line of the site's template that it comes from."""
    from jinja2 import TemplateNotFound, TemplateSyntaxError

    if isinstance(error, TemplateSyntaxError):
        return Problem(f"job template: {error.message}", error.filename, error.lineno)
    file: str | None = str(directory / TEMPLATE)
    line = None
    root = os.path.normpath(directory)  # as jinja2 normalizes the names of files
    for frame in traceback.extract_tb(error.__traceback__):
        if Path(frame.filename).is_relative_to(root) and not frame.filename.endswith(".py"):
            file, line = frame.filename, frame.lineno
    if isinstance(error, TemplateNotFound):
        message = f"there is no template `{error.name}` to extend or include"
    elif isinstance(error, UnicodeDecodeError):
        message = "not UTF-8"
    elif isinstance(error, RecursionError):
        message = "templates extend or include each other without end"
    else:
        message = str(error) or type(error).__name__
    return Problem(f"job template: {message}", file, line)
