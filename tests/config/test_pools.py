import pytest

from ray_cluster.config.loading import load_config
from ray_cluster.errors import ConfigError


def test_a_replica_on_several_gpus_is_refused_with_what_to_do() -> None:
    pool = {"name": "a", "model": "shapes-sd", "device": "cuda", "num_gpus": 1.5}
    with pytest.raises(ConfigError, match=r"num_gpus is 1\.5.*num_gpus: 1, and replicas: 2 "):
        load_config({"pools": [pool]})


def test_a_transformer_of_its_own_is_named_with_its_model() -> None:
    given = {"name": "a", "model": "/models/flux", "transformer": "/models/q4.gguf"}
    [pool] = load_config({"pools": [given]}).pools
    assert pool.files_words == "/models/flux with /models/q4.gguf"


def test_a_group_may_hold_fewer_images_than_a_batch_that_it_does_not_make() -> None:
    pool = {"name": "a", "model": "shapes-sd3", "max_in_flight": 4}
    with pytest.raises(ConfigError, match="max_batch 8 is above max_in_flight 4"):
        load_config({"pools": [pool]})
    load_config({"pools": [pool | {"ranks": 4}]})


@pytest.mark.parametrize(
    ("upscalers", "words"),
    [
        ([{"name": "big"}, {"name": "next"}], "has 2 entries.*leave one, with as many `replicas`"),
        ([{"name": "big", "num_threads": 1}], "0.num_threads: there is no such key.*: name, num_c"),
    ],
)
def test_an_upscaler_is_one_entry_without_keys_of_torch(upscalers: object, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        load_config({"pools": [{"name": "a", "model": "shapes-sd"}], "upscalers": upscalers})


@pytest.mark.parametrize(
    ("device", "capability", "expected"),
    [("cpu", None, "float32"), ("cuda", None, None), ("cuda", (9, 0), "bfloat16")],
)
def test_the_number_format_is_the_devices_unless_the_pool_names_one(
    device: str, capability: tuple[int, int] | None, expected: str | None
) -> None:
    given = {"name": "a", "model": "shapes-sd", "device": device, "num_gpus": 1}
    [pool] = load_config({"pools": [given]}).pools
    assert pool.number_format(capability) == expected
    [pool] = load_config({"pools": [given | {"dtype": "float16"}]}).pools
    assert pool.number_format(capability) == "float16"
