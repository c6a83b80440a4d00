"""A process of a run without devices: link_script.py ACTION NUMBER COUNT PORT [SECONDS]."""

import os
import sys
import time
from pathlib import Path

from comfy_tpu.config import HostsConfig
from comfy_tpu.errors import ComfyTpuError, InvalidValueError
from comfy_tpu.parallel import hosts


def say(*words, stream=sys.stdout):
    stream.write(" ".join(map(str, words)) + "\n")
    stream.flush()


def act(action, number):
    if action == "exchange":
        say(hosts.first_host_value(lambda: {"prompt": "a \udcff b", "from": number}))
        say(hosts.gather(number * 10))
        hosts.check_same(mesh="dp=2", model="demo")
        own = {"image 0": Path("a.bin"), "lora 1": Path("a.bin")} if number == 0 else {}
        with hosts.shared_files(own) as files:
            say({key: (path.name, sum(path.read_bytes())) for key, path in files.items()})
            say(len(set(files.values())))
    elif action == "together":
        for block in ("well", "one fails", "all fail", "facts differ", "well"):
            try:
                with hosts.failing_together() as facts:
                    facts["model"] = "b" if block == "facts differ" and number == 2 else "a"
                    if block == "all fail" or (block == "one fails" and number == 1):
                        raise InvalidValueError(f"{block} on {number}")
                say(block)
            except ComfyTpuError as error:
                say(error)
    elif action == "alone" and number == 1:
        hosts.AGREE_SECONDS = 0.5
        with hosts.failing_together():
            raise InvalidValueError("the others wait in a collective")
    elif action == "differ":
        hosts.check_same(mesh="sp=8" if number == 2 else "dp=2,sp=4")
    elif action == "fail" and number == 1:
        raise InvalidValueError("height=100 is odd; choose another", field="height")
    elif action == "bug" and number == 1:
        hosts.ROOT_CAUSE_SECONDS = 0.5
        raise RuntimeError("a bug")
    elif action == "kill" and number == 2:
        os.kill(os.getpid(), 9)
    elif action == "victim":
        # As a collective whose peer is gone: the main thread fails first, or never comes back.
        try:
            hosts.first_host_value(lambda: time.sleep(600))
        finally:
            say("left")
    time.sleep(0 if action in ("exchange", "together", "differ") else 600)


action, number, count, port, *seconds = sys.argv[1:]
config = HostsConfig(f"localhost:{port}", int(count), int(number), float((seconds or ["600"])[0]))
cleanup = Path(f"cleanup-{number}")
try:
    with hosts.start_hosts(
        config,
        report=lambda sentence: say(sentence, stream=sys.stderr),
        cleanups=(cleanup.touch,),
    ):
        say("joined", sorted(hosts.host_names()), hosts.is_first_host())
        act(action, int(number))
    say("done", hosts.is_first_host(), "jax" in sys.modules)
except ComfyTpuError as error:
    say(error, stream=sys.stderr)
    os._exit(1)
