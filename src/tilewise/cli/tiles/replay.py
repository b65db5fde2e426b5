"""`tilewise tiles replay`: compare tuning strategies on recorded runtimes, without measuring anything."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tilewise._wording import pluralize, with_interval
from tilewise.cli.every import AsJson, answer, argument, option, output_picture

if TYPE_CHECKING:
    from tilewise.tune.search.replay import Replay, Strategy, StrategyComparison


def replay(
    collection: Annotated[str, argument("An embedded collection's name, a folder, or a file.")] = "h200",
    split: Annotated[str, option("Which kernels: test, valid or train.")] = "test",
    model: Annotated[Path | None, option("A model file (default: the one shipped for the collection).")] = None,
    plot: Annotated[Path | None, output_picture(help="Write the curves to this picture.")] = None,
    most: Annotated[int, option("Simulate at most this many measurements.", min=1)] = 20,
    trees: Annotated[bool, option("Compare with gradient-boosted trees, trained now.")] = True,
    calibrate: Annotated[
        bool, option("First fit the tuner's Gaussian process on the validation kernels and save it.")
    ] = False,
    without_model: Annotated[
        bool, option("Replay without the model, from measurements of earlier problems only.")
    ] = False,
    seed: Annotated[int, option("Seed of the random orders and of the trees.")] = 0,
    as_json: AsJson = False,
) -> None:
    """Replay tuning on held-out kernels: mean slowdown against the number of measurements, strategy by strategy.

    Example: tilewise tiles replay h200 --plot replay.png
    """
    from tilewise.tune.search.replay import recalibrate
    from tilewise.tune.search.replay import replay as run

    if without_model:
        _without_model(collection, seed, as_json)
        return
    if calibrate:
        typer.echo(f"wrote {recalibrate(collection, model)}", err=True)
    result = run(
        collection,
        split=split,
        model=model,
        most=most,
        trees=trees,
        seed=seed,
        say=lambda line: typer.echo(line, err=True),
        progress=True,
    )
    if plot is not None:
        draw(result, plot)
    answer(as_json, result.as_dict(), *table(result))


def _without_model(collection: str, seed: int, as_json: bool) -> None:
    """Replay tuning without a cost model, and print what earlier problems save on the next."""
    from tilewise.tune.search.replay import replay_without_model

    result = replay_without_model(collection, seed=seed)
    about = f"{result['problems']} problems of {result['collection']}, its model withheld"
    budgets = range(1, len(result["strategies"][0].regret) + 1)
    answer(as_json, result, *_regrets(about, result["strategies"], budgets), *_comparisons(result["comparisons"]))


def table(result: Replay) -> list[str]:
    """Format a replay's comparison of strategies as lines of text."""
    from tilewise.tune.search.calibration import claims_text
    from tilewise.tune.search.replay import COMPARED

    configs = pluralize(result.configs, "configuration")
    about = f"{result.kernels} {result.split} kernels of {result.collection}, {configs}"
    budgets = [k for k in COMPARED if k <= len(result.strategies[0].regret)]
    lines = _regrets(about, result.strategies, budgets)
    lines.append(f"{'default':{_name_column_width(result.strategies)}}{100 * result.default:9.2f}   without measuring")
    lines.append(f"first choice without measuring: {result.first_choice:.3f} of the best (geometric mean)")
    if result.sure:
        lines.append(f"the tuner's choice is {claims_text(result.sure)}")
    return [*lines, *_comparisons(result.comparisons), *result.notes]


def _name_column_width(strategies: Sequence[Strategy]) -> int:
    return max(len(strategy.name) for strategy in strategies) + 2


def _regrets(about: str, strategies: Sequence[Strategy], budgets: Sequence[int]) -> list[str]:
    """Format mean regrets (slowdown against the best): one line per strategy, one column per measurement budget."""
    width = _name_column_width(strategies)
    lines = [
        f"{about}: mean % slower than the best, by number of measurements",
        f"{'':{width}}" + "".join(f"{k:>9d}" for k in budgets),
    ]
    return lines + [
        f"{strategy.name:{width}}" + "".join(f"{100 * strategy.regret[k - 1]:9.2f}" for k in budgets)
        for strategy in strategies
    ]


def _comparisons(comparisons: Sequence[StrategyComparison]) -> list[str]:
    """Format the saving of each mechanism in per cent of the best runtime, with its 95 % interval."""
    lines = []
    for mechanism, simpler in dict.fromkeys((c.mechanism, c.simpler) for c in comparisons):
        lines.append(f"{mechanism} saves over {simpler}, % of the best's runtime (95 % interval):")
        lines += [_format_comparison(c) for c in comparisons if (c.mechanism, c.simpler) == (mechanism, simpler)]
    return lines


def _format_comparison(c: StrategyComparison) -> str:
    """Format what one strategy saves over another after some measurements, in percent with its 95 % interval."""
    if c.saving == c.low == c.high == 0:
        return f"  after {c.measurements:2d}: the same choice for every kernel"
    saving_text = with_interval(*(f"{100 * value:.2f}" for value in (c.saving, c.low, c.high)))
    return f"  after {c.measurements:2d}: {saving_text}"


_STYLES: Mapping[str, tuple[str, str]] = {
    "random": ("#999999", ":"), "exhaustive": ("#cccccc", "-"), "analytical": ("#8172b3", "--"),
    "GBDT, first k": ("#dd8452", "-"), "the model's order, first k": ("#4c72b0", "--"),
    "ours, by expected improvement": ("#4c72b0", "-"),
}  # fmt: skip


def draw(result: Replay, path: Path) -> None:
    """Plot regret against the number of measurements, one line per strategy."""
    from matplotlib.ticker import MaxNLocator

    from tilewise.cli.pictures import picture

    with picture(path, 7.5, 4.6) as axes:
        for strategy in result.strategies:
            colour, line = _STYLES.get(strategy.name, ("#333333", "-"))
            steps, regret = range(1, len(strategy.regret) + 1), [100 * value for value in strategy.regret]
            axes.plot(steps, regret, color=colour, linestyle=line, label=strategy.name)
        axes.axhline(1.0, color="#333333", linewidth=0.6)
        axes.set_yscale("symlog", linthresh=1.0)
        axes.set_ylim(bottom=0.0)
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        title = f"{result.collection}: {result.kernels} held-out kernels"
        axes.set(xlabel="measurements a kernel", ylabel="mean % slower than the best", title=title)
        axes.legend(fontsize=8)
