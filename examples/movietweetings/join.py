"""Makes examples/movietweetings/ratings.tsv from the folder with ratings.dat and movies.dat given on the command line."""

import sys
from pathlib import Path


def main(source: Path) -> None:
    """Join the genres of each film to its ratings; one line per rating, in file order."""
    genres = {}
    for line in (source / "movies.dat").read_text(encoding="utf-8").splitlines():
        film, _, rest = line.partition("::")
        genres[film] = rest.rpartition("::")[2]
    rows = ["user\tfilm\tgenres\trating\ttime"]
    for line in (source / "ratings.dat").read_text(encoding="utf-8").splitlines():
        user, film, rating, time = line.split("::")
        rows.append("\t".join((user, film, genres.get(film, ""), rating, time)))
    target = Path(__file__).with_name("ratings.tsv")
    target.write_text("\n".join(rows) + "\n", encoding="utf-8")
    print(f"{target}: {len(rows) - 1} ratings")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
