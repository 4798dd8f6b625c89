"""Workloads: trace readers, arrival processes, length distributions and SLOs. numpy only until a file is read."""

from slacktide.workload.arrivals import Arrival, arrival_times, parse_arrival
from slacktide.workload.combine import concat, merge
from slacktide.workload.formats.base import ReadOptions
from slacktide.workload.load import load_trace, load_workload
from slacktide.workload.packaged import list_traces
from slacktide.workload.requests import ClosedLoop, Workload
from slacktide.workload.slos import SLOs, SLOSpec, list_slo_presets, parse_slo, parse_slos

__all__ = [
    "Arrival",
    "ClosedLoop",
    "ReadOptions",
    "SLOSpec",
    "SLOs",
    "Workload",
    "arrival_times",
    "concat",
    "list_slo_presets",
    "list_traces",
    "load_trace",
    "load_workload",
    "merge",
    "parse_arrival",
    "parse_slo",
    "parse_slos",
]
