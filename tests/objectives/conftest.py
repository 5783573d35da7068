"""No deadlines for hypothesis: the machine may be busy with other tests."""

from hypothesis import settings

settings.register_profile("patient", deadline=None)
settings.load_profile("patient")
