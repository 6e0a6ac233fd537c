"""See `studies.published.memory_page`, `studies.published.times_page` and `studies.published.predicted`."""

from studies.published import memory_page, predicted, times_page

if __name__ == "__main__":
    for each in (memory_page, times_page):
        each.PAGE.write_text(each.page(), encoding="utf-8")
    predicted.FILE.write_text(predicted.text(), encoding="utf-8")
