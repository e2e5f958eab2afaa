//! The socket: where the server is reached, connections, and the end of the server.

use std::io::{self, Read as _, Write as _};
use std::net::{IpAddr, Ipv4Addr, SocketAddr, TcpListener, TcpStream, ToSocketAddrs};
use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;

use axum::Router;
use hyper::server::conn::http1;
use hyper_util::rt::{TokioIo, TokioTimer};
use hyper_util::server::graceful::GracefulShutdown;
use hyper_util::service::TowerToHyperService;
use tokio::signal::unix::{Signal, SignalKind, signal};
use tokio::sync::Semaphore;
use tokio::time::timeout;

use super::app::App;
use crate::error::Complaint;
use crate::exit::ExitStatus;

/// Connections at a time; more wait in the system's queue.
const MOST_CONNECTIONS: usize = 1024;
/// Bytes of a request's head. Hyper may read as much again before it looks, so routes look too.
pub const LARGEST_HEAD: usize = 64 << 10;
/// How long a head may take to arrive.
const HEAD_PATIENCE: Duration = Duration::from_secs(30);
/// How long whoever holds the port may take to say what it is.
const PROBE_PATIENCE: Duration = Duration::from_millis(300);

/// Opens the port, before anything is loaded.
///
/// # Errors
/// There is no such address, or something is there already.
pub fn bind(host: &str, port: u16) -> Result<(TcpListener, SocketAddr), Complaint> {
    let mut addresses = (host.trim_start_matches('[').trim_end_matches(']'), port)
        .to_socket_addrs()
        .map_err(|error| Complaint::usage(format!("`--host {host}` is no address: {error}")))?;
    let address =
        addresses.next().ok_or_else(|| Complaint::usage(format!("`--host {host}` is no address")))?;
    if port != 0
        && let Some(what) = occupant(address)
    {
        return Err(taken(address, &what));
    }
    let listener = TcpListener::bind(address).map_err(|error| match error.kind() {
        io::ErrorKind::AddrInUse => taken(address, "another program"),
        _ => Complaint::failure(format!("cannot listen on {address}: {error}")),
    })?;
    let local = listener.local_addr().and_then(|local| listener.set_nonblocking(true).map(|()| local));
    let local = local.map_err(|error| Complaint::failure(format!("cannot listen on {address}: {error}")))?;
    Ok((listener, local))
}

fn taken(address: SocketAddr, what: &str) -> Complaint {
    Complaint::failure(format!("{what} listens on {address} already"))
        .hint("stop it, or choose another port with --port (0 takes any that is free)")
}

/// What answers at an address; on some systems two programs can have the same port.
fn occupant(address: SocketAddr) -> Option<String> {
    let mut reached = address;
    if address.ip().is_unspecified() {
        reached.set_ip(IpAddr::V4(Ipv4Addr::LOCALHOST));
    }
    let mut stream = TcpStream::connect_timeout(&reached, PROBE_PATIENCE).ok()?;
    let asked = format!("GET /v1 HTTP/1.1\r\nHost: {reached}\r\nConnection: close\r\n\r\n");
    let mut answer = Vec::new();
    let patience = stream.set_read_timeout(Some(PROBE_PATIENCE));
    let _ = patience
        .and_then(|()| stream.write_all(asked.as_bytes()))
        .and_then(|()| stream.take(4096).read_to_end(&mut answer));
    let ours = String::from_utf8_lossy(&answer).contains("\"name\":\"mlx-bun\"");
    Some(if ours { "another mlx-bun serve" } else { "another program" }.to_owned())
}

/// The address as a link that works on this machine.
pub fn url(address: SocketAddr) -> String {
    match address.ip().is_unspecified() {
        true => format!("http://localhost:{}", address.port()),
        false => format!("http://{address}"),
    }
}

/// Answers requests until a signal; then refuses new ones and lets those at work finish for `grace`.
///
/// # Errors
/// The system refuses the socket or the signals.
pub async fn serve(
    listener: TcpListener,
    router: Router,
    app: Arc<App>,
    grace: Duration,
    ready: impl FnOnce() -> io::Result<()>,
) -> io::Result<ExitStatus> {
    let listener = tokio::net::TcpListener::from_std(listener)?;
    let (mut interrupted, mut terminated) =
        (signal(SignalKind::interrupt())?, signal(SignalKind::terminate())?);
    ready()?;
    let connections = GracefulShutdown::new();
    let places = Arc::new(Semaphore::new(MOST_CONNECTIONS));
    let status = loop {
        let accept = async {
            let place = Arc::clone(&places).acquire_owned().await.map_err(io::Error::other)?;
            listener.accept().await.map(|(stream, _)| (stream, place))
        };
        let (stream, place) = tokio::select! {
            accepted = accept => match accepted {
                Ok(accepted) => accepted,
                Err(error) => {
                    // Out of file descriptors, say: those at work will give some back.
                    app.log.event("accept", &format!("a connection was lost: {error}"));
                    tokio::time::sleep(Duration::from_millis(50)).await;
                    continue;
                }
            },
            status = stopped(&mut interrupted, &mut terminated) => break status,
        };
        let _ = stream.set_nodelay(true);
        let service = TowerToHyperService::new(router.clone());
        let connection = http1::Builder::new()
            .timer(TokioTimer::new())
            .header_read_timeout(HEAD_PATIENCE)
            .max_buf_size(LARGEST_HEAD)
            .serve_connection(TokioIo::new(stream), service);
        let connection = connections.watch(connection);
        tokio::spawn(async move {
            // A client that goes is no event.
            let _ = connection.await;
            drop(place);
        });
    };
    drop(listener);
    app.log.event("stopping", "stopping; press Ctrl-C again to stop at once");
    let engine = app.engine.clone();
    let stop = async {
        let stopping = tokio::task::spawn_blocking(move || engine.stop(grace));
        let _ = timeout(grace + Duration::from_secs(5), connections.shutdown()).await;
        let _ = stopping.await;
    };
    tokio::select! {
        () = stop => {}
        _ = stopped(&mut interrupted, &mut terminated) => {}
    }
    Ok(status)
}

/// The signal that ends the server: an orderly end for SIGTERM, which is how servers are stopped.
async fn stopped(interrupted: &mut Signal, terminated: &mut Signal) -> ExitStatus {
    let (interrupted, terminated) = (pin!(interrupted.recv()), pin!(terminated.recv()));
    tokio::select! {
        _ = interrupted => ExitStatus::Interrupted,
        _ = terminated => ExitStatus::Success,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_port_that_is_taken_is_told() {
        let (listener, address) = bind("127.0.0.1", 0).unwrap();
        let error = bind("127.0.0.1", address.port()).unwrap_err().to_string();
        assert_eq!(error, format!("another program listens on {address} already"));
        drop(listener);
        assert!(bind("127.0.0.1", address.port()).is_ok());
        assert!(bind("no such host", 1).is_err());
    }

    #[test]
    fn links_work_here() {
        assert_eq!(url("0.0.0.0:80".parse().unwrap()), "http://localhost:80");
        assert_eq!(url("[::1]:81".parse().unwrap()), "http://[::1]:81");
    }
}
