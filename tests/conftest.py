"""For every test: property tests try the same examples in each run, so that a change is judged by itself.

`HYPOTHESIS_PROFILE=explore make test` tries others, as is worth doing now and then.
"""

import os

from hypothesis import settings

settings.register_profile("repeat", derandomize=True)
settings.register_profile("explore", derandomize=False, print_blob=True)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "repeat"))
