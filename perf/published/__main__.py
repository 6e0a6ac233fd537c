"""See `perf.published.page` and `perf.published.times_page`."""

from perf.published import page, times_page

if __name__ == "__main__":
    page.write()
    times_page.write()
