"""See `perf.published.page`."""

from perf.published.page import write

if __name__ == "__main__":
    write()
