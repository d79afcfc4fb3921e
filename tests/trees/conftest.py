"""Property tests of this folder: no time limit an example, which a busy machine would break."""

from hypothesis import settings

settings.register_profile("trees", deadline=None, max_examples=50)
settings.load_profile("trees")
