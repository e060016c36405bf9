from hypothesis import settings

# No deadline: the machine that runs the tests may be busy.
settings.register_profile("tpwrap", deadline=None, max_examples=60)
settings.load_profile("tpwrap")
