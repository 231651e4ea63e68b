"""Requests to a server on this machine under another name, as a browser sends them once that name means 127.0.0.1."""

from http.client import HTTPConnection
from urllib.parse import urlsplit


def status_of(url: str, host: str, path: str = "/v1/models") -> int:
    """The status of a GET with the header Host."""
    connection = HTTPConnection(urlsplit(url).netloc, timeout=20)
    connection.request("GET", path, headers={"Host": host})
    status = connection.getresponse().status
    connection.close()
    return status
