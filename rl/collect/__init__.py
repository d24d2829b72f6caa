"""A step's groups and their rewards, in one of three ways, each in a file of its own.

`whole`: all groups are sampled, then rewarded. `dynamic_sampling`: each is rewarded as soon as it
is complete, and replaced if all of its samples earned the same reward. `partial`: more groups are
under way than the step needs, and those that it does not wait for are carried over.
"""
