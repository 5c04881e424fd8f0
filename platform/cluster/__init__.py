"""All of Ray, behind the port that `port.Cluster` describes."""

from .port import Cluster, Node, OnMetrics, Tracking, TrainingOrder
from .ray_cluster import RayCluster

__all__ = ["Cluster", "Node", "OnMetrics", "RayCluster", "Tracking", "TrainingOrder"]
