"""Property tests here draw the same examples every time and take as long as a busy machine needs."""

from hypothesis import settings

settings.register_profile("kvstow", deadline=None, derandomize=True)
settings.load_profile("kvstow")
