"""What went wrong with a store behind a URL: as one sentence, and whether it may pass."""

from urllib.parse import urlsplit, urlunsplit

from torchtitan.models.dit_tts.errors import InputError


def shown(url: str) -> str:
    """The URL as messages name it: without a password and without the signature of its query."""
    parts = urlsplit(url)
    return urlunsplit((parts.scheme, parts.netloc.rpartition("@")[2], parts.path, "", ""))


def changed(url: str, size: int, found: int | None = None) -> InputError:
    """The object is no longer the one of ``size`` bytes that was opened; it has ``found`` bytes."""
    has = (
        "has another content than its index was made from"
        if found is None or found == size
        else f"has {found} bytes where its index was made from {size}"
    )
    return InputError(f"{shown(url)}: {has}; shards must not change during a run, so start again.")


def ignores_ranges(url: str, start: int, stop: int) -> InputError:
    return InputError(
        f"{shown(url)}: the server ignores range requests (asked for bytes {start}-{stop - 1} it "
        "sends others); use a server that supports HTTP Range requests or copy the shards to a "
        "local folder."
    )


def failed(url: str, doing: str, reason: str, advice: str, tries: int) -> InputError:
    times = f", tried {tries} times" if tries > 1 else ""
    return InputError(f"{shown(url)}: cannot be {doing} ({reason}{times}); {advice}.")


def explain(error: BaseException) -> tuple[str, str, bool]:
    """(what happened, what to do, whether it may pass) of an exception from a store."""
    chain = _chain(error)
    kinds = {kind.__name__ for one in chain for kind in type(one).__mro__}
    status = status_of(error)
    # HTTPFileSystem.info raises FileNotFoundError whatever happened; the cause tells what did.
    cause = chain[1] if isinstance(error, FileNotFoundError) and len(chain) > 1 else error
    reason = one_line(cause)
    if "NoCredentialsError" in kinds or "PartialCredentialsError" in kinds:
        advice = (
            "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or FSSPEC_S3_ANON=true for a public "
            "bucket"
        )
        return "no credentials found", advice, False
    if status in (401, 403) or "PermissionError" in kinds:
        status_text = f"status {status}: " if status else ""
        return f"{status_text}access denied", "check the credentials and their rights", False
    if status in (404, 410):
        return "not found", "check the URL", False
    if status is not None:
        may_pass = status in (408, 425, 429) or status >= 500
        return f"status {status}", "see the server's own log or documentation", may_pass
    connection = kinds & {
        "TimeoutError",
        "ConnectionError",
        "ClientError",
        "HTTPClientError",
        "ResponseParserError",
        "gaierror",
        "SSLError",
        "IncompleteReadError",
        "IncompleteRead",
    }
    if connection:
        return reason, "check the URL's host and the network, then start again", True
    if "FileNotFoundError" in kinds:
        return "not found", "check the URL", False
    if isinstance(error, OSError) and not isinstance(error, NotADirectoryError | IsADirectoryError):
        return reason, "check the store, then start again", True
    return reason, "check the URL and the settings of its store", False


def status_of(error: BaseException) -> int | None:
    """The HTTP status among an exception and its causes: aiohttp's, botocore's or gcsfs's."""
    for one in _chain(error):
        response = getattr(one, "response", None)
        metadata = response.get("ResponseMetadata", {}) if isinstance(response, dict) else {}
        for value in (metadata.get("HTTPStatusCode"), getattr(one, "status", None)):
            if isinstance(value, int) and value >= 400:
                return value
    return None


def one_line(error: BaseException) -> str:
    text = " ".join(str(error).split())
    return text[:300] if text else type(error).__name__


def _chain(error: BaseException) -> list[BaseException]:
    chain = [error]
    while chain[-1].__cause__ is not None and len(chain) < 8:
        chain.append(chain[-1].__cause__)
    return chain
