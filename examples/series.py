"""From a CSV with gaps to a picture with bands: fit, fill, forecast.

Give it a file whose first column is the time (dates or numbers) and whose second is the value, with
empty fields or missing rows where nothing was measured. Without one it writes the Nile with holes.
"""

import argparse
from pathlib import Path

import pandas as pd

from kalman_attention.series import NILE, NILE_YEARS, StateSpace


def write_nile(path: Path) -> None:
    """The Nile with every fifth year empty and the years of the first war left out."""
    rows = [
        f"{year}-07-01,{'' if year % 5 == 0 else flow}"
        for year, flow in zip(NILE_YEARS, NILE, strict=True)
        if not 1914 <= year <= 1918
    ]
    path.write_text("\n".join(["date,flow", *rows]) + "\n")


def main() -> None:
    """Read, fit, print, draw."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("csv", type=Path, nargs="?", help="your file (default: the Nile)")
    parser.add_argument("--model", default="level", help='such as "level + cycle" or "ou"')
    parser.add_argument("--horizon", type=int, default=10, help="steps to forecast")
    parser.add_argument("--out", type=Path, default=Path("."), help="folder of the picture")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    if args.csv is None:
        args.csv = args.out / "nile.csv"
        write_nile(args.csv)
    y = pd.read_csv(args.csv, index_col=0, parse_dates=True).iloc[:, 0]

    results = StateSpace(args.model).fit(y, time_unit=pd.Timedelta(days=365.25))
    print(results.summary())
    print(results.predict().summary_frame()[y.isna().to_numpy()].head())  # the empty fields
    print(results.forecast(args.horizon).summary_frame().tail(3))
    results.plot(horizon=args.horizon).savefig(args.out / "series.png", dpi=150)
    print(f"{args.out / 'series.png'}: {int(y.notna().sum())} values, {int(y.isna().sum())} filled")


if __name__ == "__main__":
    main()
