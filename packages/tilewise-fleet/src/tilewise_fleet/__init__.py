"""tilewise-fleet: measurements from many machines.

- `campaign.run_campaign` measures kernels on the nodes of a Ray cluster; `sweep.run_sweep` trains cost models there.
- `service.app.create_app` serves tuned configurations and accepts measurements over HTTP.
- `up.running_fleet` starts all of it on one machine, to try it out.
"""

__version__ = "0.1.0"
