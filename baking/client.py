"""Prompts for a ComfyUI server, and how far they are."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from typing import Any

from .comfy_process import ComfyError, ComfyProcess
from .workflow import Prompt

SHOWN = 300
"""Characters of a server's complaint that a message repeats."""

OnProgress = Callable[[int, int], None]


class PromptError(Exception):
    """ComfyUI refuses a prompt, or a node of it fails. The message is one sentence for people."""


def run(server: ComfyProcess, prompt: Prompt, on_progress: OnProgress = lambda done, total: None) -> dict[str, Any]:
    """Run a prompt, and return what its nodes show, by their ids. Raises PromptError, ComfyError if the server ends.

    `on_progress` is told how many graphs of a model are done, and how many there are.
    """
    return asyncio.run(_run(server, prompt, on_progress))


async def _run(server: ComfyProcess, prompt: Prompt, on_progress: OnProgress) -> dict[str, Any]:
    import aiohttp

    try:
        async with (
            aiohttp.ClientSession(server.address) as session,
            session.ws_connect("/ws?clientId=bake", max_msg_size=0) as events,
        ):
            prompt_id = await _queue(session, prompt)
            async for event in events:
                if event.type is aiohttp.WSMsgType.TEXT and _is_over(json.loads(event.data), prompt_id, on_progress):
                    break
            return await _outputs(session, prompt_id)
    except (aiohttp.ClientError, OSError) as error:
        if server.is_alive:
            raise PromptError(f"ComfyUI does not answer ({type(error).__name__}: {error})") from None
        raise ComfyError(f"ComfyUI ended. {server.end_of_log()}") from None


async def _queue(session: Any, prompt: Prompt) -> str:
    async with session.post("/prompt", json={"prompt": prompt, "client_id": "bake"}) as answer:
        body = await answer.json(content_type=None)
    if "prompt_id" not in body:
        raise PromptError(_complaint(body, prompt))
    return body["prompt_id"]


def _is_over(event: dict[str, Any], prompt_id: str, on_progress: OnProgress) -> bool:
    """Note what an event says, and return whether the prompt has ended."""
    kind, data = event.get("type"), event.get("data") or {}
    if kind == "progress":
        on_progress(int(data.get("value", 0)), int(data.get("max", 0)))
    if data.get("prompt_id") != prompt_id:
        return False
    is_last = kind == "executing" and data.get("node") is None
    return is_last or kind in ("execution_success", "execution_error", "execution_interrupted")


async def _outputs(session: Any, prompt_id: str) -> dict[str, Any]:
    """Return what the nodes of a prompt show. The history has it a moment after the last event."""
    while True:
        async with session.get(f"/history/{prompt_id}") as answer:
            entry = (await answer.json()).get(prompt_id)
        if entry is not None:
            break
        await asyncio.sleep(0.05)
    status = entry.get("status") or {}
    if status.get("status_str") == "error":
        raise PromptError(_failure(status))
    return entry["outputs"]


def _complaint(body: dict[str, Any], prompt: Prompt) -> str:
    """Return why a prompt was refused: the first complaint about a node, such as a file that is not there."""
    for name, node in (body.get("node_errors") or {}).items():
        for error in node.get("errors", ()):
            kind = prompt.get(name, {}).get("class_type", "")
            return f"{kind} (node {name}): {error.get('message')}: {str(error.get('details'))[:SHOWN]}"
    error = body.get("error")
    return str(error.get("message") if isinstance(error, dict) else error)[:SHOWN]


def _failure(status: dict[str, Any]) -> str:
    for kind, data in status.get("messages", ()):
        if kind == "execution_error":
            what = f"{data.get('exception_type')}: {str(data.get('exception_message')).strip()}"
            return f"{data.get('node_type')} (node {data.get('node_id')}) failed with {what[:SHOWN]}"
        if kind == "execution_interrupted":
            return "it was cancelled"
    return "it failed"
