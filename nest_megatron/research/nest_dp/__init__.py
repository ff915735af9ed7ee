"""Research mode: NEST's recurrence over downsets of a layer graph, levels, devices and stages.

Source: arXiv 2603.06798, section 4 and appendices B.2 (torus) and C.3 (ZeRO under small memory). A
state is the least bottleneck with which a downset of the graph, on devices from 0 up to some place
and in so many stages, can be run, if the next stage is no farther away than a network level.

What is exact: the least ``bottleneck * (micro batches + stages - 1) + slowest sum of gradients``
over every division into nested downsets, every placement of the stages one after another with any
devices left idle between them, every number of replicas and every strategy. The tests
price that space plan by plan.
"""
