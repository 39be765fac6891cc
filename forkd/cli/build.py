"""`forkd build`: a recipe or a Dockerfile to a warmed parent, every step kept."""

from __future__ import annotations

from pathlib import Path

import click

from forkd.cli.common import fail, json_option, print_json, progress_bar, table, with_controller


@click.command("build")
@click.argument("source", type=click.Path(path_type=Path, exists=True))
@click.option("--tag", help="Tag of the new snapshot; a recipe's own name by default.")
@click.option(
    "--context", type=click.Path(path_type=Path, exists=True, file_okay=False), help="Where COPY copies from."
)
@click.option("--replace", is_flag=True, help="Remove a snapshot that has the tag already, once the new one is built.")
@click.option("--no-cache", is_flag=True, help="Run every step again.")
@json_option
def command(source: Path, tag: str | None, context: Path | None, replace: bool, no_cache: bool, as_json: bool) -> None:
    """Build a parent from SOURCE: a recipe (TOML), a Dockerfile, or a directory that has one.

    Each step runs in a VM and stays as a snapshot that can be forked; a second build begins at the first step that
    changed. Of a Dockerfile, FROM, RUN, COPY, ENV, WORKDIR and USER are understood.

    \b
    forkd build recipes/parents/nodejs.toml
    forkd build ./app --tag app
    """
    from forkd.sdk.building import build_recipe
    from forkd.sdk.dockerfile import read_dockerfile
    from forkd.sdk.recipe import read_recipe
    from forkd.specs.errors import BadInput

    try:
        path = source / "Dockerfile" if source.is_dir() else source
        recipe = read_recipe(path) if path.suffix == ".toml" else read_dockerfile(path, context)
        name = tag or recipe.name
        if name is None:
            raise BadInput("a Dockerfile has no name", hint="give one: --tag NAME")
    except BadInput as error:
        fail(error)
    with progress_bar() as progress:
        built = with_controller(
            lambda controller: build_recipe(controller, recipe, name, progress, replace=replace, cache=not no_cache)
        )
    if as_json:
        print_json(built)
        return
    rows = [[row["step"], row["tag"], "cached" if row["cached"] else "built"] for row in built["steps"]]
    table(["STEP", "SNAPSHOT", ""], rows)
    click.echo(f"tag: {built['tag']}\ndir: {built['dir']}")
