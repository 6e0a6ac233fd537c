"""See `studies.published.memory_page` and `studies.published.times_page`."""

from studies.published import memory_page, times_page

if __name__ == "__main__":
    for each in (memory_page, times_page):
        each.PAGE.write_text(each.page(), encoding="utf-8")
