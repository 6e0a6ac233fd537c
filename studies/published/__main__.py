"""See `studies.published.memory_page` and `studies.published.times_page`."""

from studies.published import memory_page as page
from studies.published import times_page

if __name__ == "__main__":
    page.write()
    times_page.write()
