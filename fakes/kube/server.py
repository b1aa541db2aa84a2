"""HTTP: who asks, for what, and the answer. One handler for every path, as the paths follow one rule."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

import msgspec
from aiohttp import web

from fakes.kube import protobuf, resources, tables
from fakes.kube.api import Api, Options, shown
from fakes.kube.audit import AuditLog, Request
from fakes.kube.faults import Faults
from fakes.kube.resources import NODES, Resource
from fakes.kube.selectors import matcher
from fakes.kube.status import (
    ApiStatus,
    Obj,
    bad_request,
    method_not_allowed,
    no_such_path,
    unauthorized,
    unsupported_media_type,
)
from fakes.kube.targets import Target, not_for_anonymous, target_of
from fakes.kube.tokens import ANONYMOUS, Refused, Tokens, User
from fakes.kube.watching import Watch, Wish

MAX_BODY_BYTES = 3 * 1024 * 1024
VERSION: Mapping[str, str] = {
    "major": "1",
    "minor": "37",
    "gitVersion": "v1.37.2+headway.embedded",
    "gitCommit": "",
    "gitTreeState": "clean",
    "buildDate": "1970-01-01T00:00:00Z",
    "goVersion": "",
    "compiler": "",
    "platform": "",
}
_HEALTH = frozenset({"/healthz", "/livez", "/readyz"})
_PATCHES = frozenset(
    {"application/json-patch+json", "application/merge-patch+json", "application/strategic-merge-patch+json"}
)


class Server:
    """`bookmark_s`: how often a watch that asked for bookmarks gets one."""

    def __init__(self, api: Api, tokens: Tokens, faults: Faults, audit: AuditLog, bookmark_s: float) -> None:
        self._api = api
        self._tokens = tokens
        self._faults = faults
        self._audit = audit
        self._bookmark_s = bookmark_s
        self.stopping = asyncio.Event()

    def application(self) -> web.Application:
        app = web.Application(client_max_size=MAX_BODY_BYTES)
        app.router.add_route("*", "/{path:.*}", self.handle)
        return app

    async def handle(self, http: web.Request) -> web.StreamResponse:
        request = Request(
            audit_id=str(uuid.uuid4()),
            received=datetime.now(UTC),
            uri=http.path_qs,
            source=http.remote or "",
            agent=http.headers.get("User-Agent", ""),
            verb=http.method.lower(),
        )
        code = 500
        try:
            answer = await self._answer(http, request)
            code = answer.status
            return answer
        except ApiStatus as error:
            code = error.code
            return _json(error.body(), code, {"Audit-Id": request.audit_id, **error.headers})
        finally:
            if http.path not in _HEALTH:
                self._audit.write(request, code)

    async def _answer(self, http: web.Request, request: Request) -> web.StreamResponse:
        if http.path in _HEALTH or http.path.startswith("/readyz/"):
            return web.Response(text="ok")
        if http.path == "/version":
            return _json(dict(VERSION), 200, {})
        # Before authentication, as a server that is overloaded; the way to end it stays open.
        if http.path != "/faults":
            await self._faults.before(http.path)
        request.user = self._authenticated(http)
        if http.path == "/faults":
            return await self._set_faults(http, request.user)
        headers = {"Audit-Id": request.audit_id, "Cache-Control": "no-cache, private"}
        target = target_of(http.method, http.path, http.query.get("watch") in ("1", "true"))
        if target is not None:
            request.verb, request.target = target.verb, target.as_object()
        if request.user == ANONYMOUS:
            raise not_for_anonymous(http.method, http.path, target)
        if target is None:
            return _json(_document(http), 200, headers)
        style = _style(http.headers.get("Accept", "*/*"))
        if target.verb == "watch":
            return await self._watch(http, target, style, headers)
        body = await _body(http) if target.verb in ("create", "update", "patch", "delete", "deletecollection") else None
        if target.resource is NODES and target.verb in ("create", "update", "patch"):
            request.body = body
        code, obj = self._do(target, http, body, request.user)
        if style == "Table" and target.verb in ("get", "list") and obj.get("kind") != "Status":
            obj = _as_table(target.resource, obj, http.query.get("includeObject", "Metadata"))
        elif style.startswith("Partial") and target.verb in ("get", "list"):
            obj = _as_partial(obj)
        return _json(obj, code, headers)

    def _authenticated(self, http: web.Request) -> User:
        scheme, _, token = http.headers.get("Authorization", "").partition(" ")
        if scheme.lower() != "bearer" or not token.strip():
            return ANONYMOUS
        try:
            return self._tokens.authenticate(token.strip())[0]
        except Refused:
            raise unauthorized() from None

    async def _set_faults(self, http: web.Request, user: User) -> web.StreamResponse:
        if "system:masters" not in user.groups:
            raise ApiStatus(403, "faults are set by an admin")
        if http.method == "POST":
            self._faults.set(await _body(http))
        state = {"delay_s": self._faults.delay_s, "fail": self._faults.failing, "path": self._faults.path}
        return _json(state, 200, {})

    # --- verbs --------------------------------------------------------------------------------------------------------

    def _do(self, target: Target, http: web.Request, body: Any, user: User) -> tuple[int, Obj]:
        api, resource, namespace, name = self._api, target.resource, target.namespace or "", target.name
        options = Options.of(http.query)
        match target.verb:
            case "get":
                return 200, shown(resource, api.get(resource, namespace, name))
            case "list":
                return 200, self._list(target, http.query)
            case "create":
                return 201, self._create(target, _object(body), options, user)
            case "update":
                done = api.update(resource, namespace, name, target.sub, _object(body), options)
                return 200, shown(resource, done)
            case "patch":
                media = http.content_type
                if media not in _PATCHES:
                    raise unsupported_media_type()
                done = api.patch(resource, namespace, name, target.sub, body, media, options)
                return 200, shown(resource, done)
            case "delete":
                return 200, shown(resource, api.delete(resource, namespace, name, _wish(http.query, body), options))
            case _:
                matches = matcher(resources.storage_of(resource), http.query, target.namespace)
                gone = api.delete_all(resource, matches, _wish(http.query, body), options)
                return 200, _list_of(resource, gone, {"resourceVersion": str(api.store.version)})

    def _create(self, target: Target, body: Obj, options: Options, user: User) -> Obj:
        namespace, name = target.namespace or "", target.name
        match (target.resource.plural, target.sub):
            case ("pods", "eviction"):
                return self._api.evict(namespace, name, body, options)
            case ("pods", "binding"):
                return self._api.bind(namespace, name, body)
            case ("serviceaccounts", "token"):
                return self._tokens.request(namespace, name, body)
            case ("tokenreviews", ""):
                return self._tokens.review(body)
            case ("selfsubjectreviews", ""):
                head = {"kind": "SelfSubjectReview", "apiVersion": "authentication.k8s.io/v1"}
                return {**head, "metadata": {}, "status": {"userInfo": user.as_object()}}
        return shown(target.resource, self._api.create(target.resource, namespace, body, options))

    def _list(self, target: Target, query: Mapping[str, str]) -> Obj:
        resource, store = target.resource, self._api.store
        version = query.get("resourceVersion", "")
        if version and not version.isdigit():
            why = f'resourceVersion: Invalid value: "{version}": strconv.ParseUint: parsing "{version}": invalid syntax'
            raise bad_request(f"invalid resource version: {why}")
        if version and int(version) > store.version:
            causes = [{"reason": "ResourceVersionTooLarge", "message": "Too large resource version"}]
            text = f"Timeout: Too large resource version: {version}, current: {store.version}"
            raise ApiStatus(504, text, details={"causes": causes, "retryAfterSeconds": 1})
        limit = int(query.get("limit") or 0) if (query.get("limit") or "0").isdigit() else 0
        if token := query.get("continue"):
            items, meta = store.next_page(resources.storage_of(resource), token, limit)
        else:
            found = self._api.list(resource, matcher(resources.storage_of(resource), query, target.namespace))
            items, meta = store.page(resources.storage_of(resource), found, limit)
        return _list_of(resource, items, meta)

    async def _watch(
        self, http: web.Request, target: Target, style: str, headers: Mapping[str, str]
    ) -> web.StreamResponse:
        resource = target.resource
        wish = Wish.of(http.query)
        matches = matcher(resources.storage_of(resource), http.query, target.namespace)
        include = http.query.get("includeObject", "Metadata")

        def show(obj: Obj) -> Obj:
            if style == "Table":
                return tables.table(resource, [obj], {"resourceVersion": obj["metadata"]["resourceVersion"]}, include)
            return tables.partial(obj) if style.startswith("Partial") else shown(resource, obj)

        cut = self._faults.watched()
        answer = web.StreamResponse(headers={**headers, "Content-Type": "application/json"})
        try:
            await answer.prepare(http)
            watch = Watch(self._api.store, resource, matches, show, self._bookmark_s, (cut, self.stopping))
            async for chunk in watch.chunks(wish):
                await answer.write(chunk)
            if cut.is_set() and http.transport is not None:
                http.transport.abort()
            else:
                await answer.write_eof()
        except ConnectionError:
            pass  # the client went away, which ends a watch as well as its time does
        finally:
            self._faults.unwatched(cut)
        return answer


# --- bodies -----------------------------------------------------------------------------------------------------------


async def _body(http: web.Request) -> Any:
    """The decoded JSON body; {} where there is none. Raises ApiStatus."""
    try:
        raw = await http.read()
    except web.HTTPRequestEntityTooLarge:
        text = f"Request entity too large: limit is {MAX_BODY_BYTES}"
        raise ApiStatus(413, text, reason="RequestEntityTooLarge", details={}) from None
    if not raw:
        return {}
    # An unnamed type is read as JSON, as a real server does.
    if http.content_type not in {"application/json", "application/octet-stream", protobuf.MEDIA_TYPE, *_PATCHES}:
        raise unsupported_media_type()
    try:
        return protobuf.decoded(raw) if http.content_type == protobuf.MEDIA_TYPE else msgspec.json.decode(raw)
    except msgspec.DecodeError as error:
        raise bad_request(f"couldn't get version/kind; json parse error: {error}") from None
    except protobuf.NotProtobuf as error:
        raise bad_request(str(error)) from None


def _object(body: Any) -> Obj:
    if not isinstance(body, dict):
        raise bad_request("the body is not a JSON object")
    return body


def _wish(query: Mapping[str, str], body: Any) -> Obj:
    wish = dict(_object(body))
    if (grace := query.get("gracePeriodSeconds", "")).isdigit():
        wish.setdefault("gracePeriodSeconds", int(grace))
    return wish


def _json(obj: Any, code: int, headers: Mapping[str, str]) -> web.Response:
    body = msgspec.json.encode(obj) + b"\n"
    return web.Response(body=body, status=code, headers=headers, content_type="application/json")


def _list_of(resource: Resource, items: Sequence[Obj], meta: Obj) -> Obj:
    shown_items = [{k: v for k, v in shown(resource, one).items() if k not in ("kind", "apiVersion")} for one in items]
    head = {"kind": f"{resource.kind}List", "apiVersion": resource.api_version, "metadata": meta}
    return {**head, "items": shown_items}


def _style(accept: str) -> str:
    """ "" for plain JSON, or "Table", "PartialObjectMetadata…", by the first form asked for that is served."""
    for form in accept.split(","):
        media, *parameters = [part.strip() for part in form.split(";")]
        if media not in ("application/json", "*/*", "application/*"):
            continue
        wanted = next((one.removeprefix("as=") for one in parameters if one.startswith("as=")), "")
        if wanted in ("", "Table", "PartialObjectMetadata", "PartialObjectMetadataList"):
            return wanted
    raise ApiStatus(406, "only application/json is served here", reason="NotAcceptable", details={})


def _items(obj: Obj) -> list[Obj]:
    if "items" not in obj:
        return [obj]
    kind, version = str(obj["kind"]).removesuffix("List"), obj["apiVersion"]
    return [{"kind": kind, "apiVersion": version, **one} for one in obj["items"]]


def _as_table(resource: Resource, obj: Obj, include: str) -> Obj:
    meta = obj["metadata"] if "items" in obj else {"resourceVersion": obj["metadata"]["resourceVersion"]}
    return tables.table(resource, _items(obj), meta, include)


def _as_partial(obj: Obj) -> Obj:
    if "items" not in obj:
        return tables.partial(obj)
    head = {"kind": "PartialObjectMetadataList", "apiVersion": "meta.k8s.io/v1", "metadata": obj["metadata"]}
    return {**head, "items": [tables.partial(one) for one in _items(obj)]}


def _document(http: web.Request) -> Obj:
    """Discovery. Raises ApiStatus 404 for any other path."""
    parts = [part for part in http.path.split("/") if part]
    found: Obj | None = None
    match parts:
        case ["api"]:
            found = resources.api_versions()
        case ["api", "v1"]:
            found = resources.resource_list("")
        case ["apis"]:
            found = resources.group_list()
        case ["apis", group]:
            found = resources.group(group)
        case ["apis", group, "v1"]:
            found = resources.resource_list(group)
        case ["openapi", "v3"]:
            found = resources.openapi_index()
        case ["openapi", "v3", *rest]:
            found = resources.openapi("/".join(rest))
    if found is None:
        raise no_such_path()
    if http.method != "GET":
        raise method_not_allowed()
    return found
