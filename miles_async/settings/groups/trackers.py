"""TRACKERS: where a run's curves are shown beside metrics.jsonl and report.html."""

from typing import Annotated, Literal

from miles_async.settings.doc import Group, doc


class TrackersSettings(Group, frozen=True, kw_only=True):
    """Experiment trackers and monitoring. A tracker that fails never holds up the run; it gets what it missed later."""

    use_tensorboard: Annotated[
        bool | None, doc("Write TensorBoard event files. Unset: where the tensorboard package is installed.")
    ] = None
    tensorboard_dir: Annotated[str | None, doc("Folder of the event files. Unset: tensorboard in the run's folder.", ours=True)] = (
        None
    )
    use_wandb: Annotated[bool, doc("Log to Weights & Biases.")] = False
    wandb_mode: Annotated[
        Literal["online", "offline", "disabled"] | None,
        doc("offline: files that `wandb sync` sends later. Unset: as WANDB_MODE says, else online."),
    ] = None
    wandb_dir: Annotated[str | None, doc("Folder of the files of W&B. Unset: the run's folder.")] = None
    wandb_key: Annotated[str | None, doc("API key; better in the variable WANDB_API_KEY.", secret=True)] = None
    wandb_host: Annotated[str | None, doc("URL of a server of your own.")] = None
    wandb_team: Annotated[str | None, doc("Entity that owns the project.")] = None
    wandb_project: Annotated[str | None, doc("Project. Unset: miles_async.")] = None
    wandb_group: Annotated[str | None, doc("Group that the run is shown in.")] = None
    wandb_run_id: Annotated[str | None, doc("Go on in this run. Unset: one id for all starts of the run.")] = None
    use_mlflow: Annotated[bool, doc("Log the run to MLflow.")] = False
    mlflow_tracking_uri: Annotated[
        str | None, doc("Server, or sqlite:///FILE. Unset: as MLFLOW_TRACKING_URI says, else MLflow's own choice.")
    ] = None
    mlflow_experiment_name: Annotated[str | None, doc("Experiment. Unset: miles_async.")] = None
    mlflow_run_name: Annotated[str | None, doc("Name shown. Unset: the run's.")] = None
    mlflow_run_id: Annotated[str | None, doc("Go on in this run. Unset: one for all starts of the run.")] = None
    use_trackio: Annotated[bool, doc("Log the run to Trackio.", ours=True)] = False
    trackio_project: Annotated[str | None, doc("Project. Unset: miles_async.", ours=True)] = None
    otel_endpoint: Annotated[
        str | None,
        doc(
            "Send the lives of samples as OpenTelemetry traces to this collector (OTLP/JSON over HTTP). Unset: none. Its keys are "
            "in the variable OTEL_EXPORTER_OTLP_HEADERS.",
            ours=True,
        ),
    ] = None
    otel_sample_share: Annotated[
        float, doc("Share of all samples that is sent to otel_endpoint, chosen by their ids.", ge=0, le=1, ours=True)
    ] = 1.0
    use_prometheus: Annotated[bool, doc("Serve /metrics for Prometheus: all actors and streams of the run, one address.")] = False
    prometheus_port: Annotated[int, doc("Port of --prometheus-host.", ge=1, le=65535)] = 9090
    prometheus_host: Annotated[
        str, doc("Address of /metrics. 0.0.0.0 lets other hosts ask; it tells numbers and names, no samples.", ours=True)
    ] = "127.0.0.1"
    prometheus_run_name: Annotated[str | None, doc("Label `run` of every metric. Unset: the run's name.")] = None
