//! Minimal gRPC client and server: unary calls over HTTP/2, and as much protobuf as they need.
//!
//! Both systems are called by the same client, so that neither has a cheaper protocol.

use std::future::Future;
use std::net::SocketAddr;

use bytes::{BufMut, Bytes, BytesMut};
use h2::{RecvStream, client, server};
use http::{HeaderMap, HeaderValue, Request, Response};
use tokio::net::{TcpListener, TcpStream};

use crate::LedgerBenchError;

/// Length of a gRPC message prefix: the compression flag and the length.
const PREFIX: usize = 5;

/// HTTP/2 connection for many concurrent calls.
#[derive(Clone)]
pub(crate) struct GrpcConnection {
    send: client::SendRequest<Bytes>,
    address: SocketAddr,
}

impl GrpcConnection {
    pub(crate) async fn open(address: SocketAddr) -> Result<Self, LedgerBenchError> {
        let socket = TcpStream::connect(address).await.map_err(LedgerBenchError::system("connect"))?;
        socket.set_nodelay(true).map_err(LedgerBenchError::system("connect"))?;
        let (send, driver) = client::handshake(socket).await.map_err(LedgerBenchError::call("connect"))?;
        // The driver ends with the connection; its errors reach the calls.
        tokio::spawn(async move { drop(driver.await) });
        Ok(Self { send, address })
    }

    /// Performs one unary call.
    pub(crate) async fn call(&self, path: &'static str, message: &[u8]) -> Result<Bytes, LedgerBenchError> {
        let request = Request::post(format!("http://{}{path}", self.address))
            .header("content-type", "application/grpc")
            .header("te", "trailers")
            .body(())
            .expect("a sound request");
        let failed = LedgerBenchError::call(path);
        let exchange = async {
            let mut send = self.send.clone().ready().await?;
            let (answer, mut body) = send.send_request(request, false)?;
            body.send_data(framed(message), true)?;
            let mut body = answer.await?.into_body();
            let bytes = collect(&mut body).await?;
            Ok((bytes, body.trailers().await?))
        };
        let (bytes, trailers): (Bytes, Option<HeaderMap>) = exchange.await.map_err(failed)?;
        let status = trailers.as_ref().and_then(|trailers| trailers.get("grpc-status"));
        if status.is_none_or(|status| status != "0") {
            return Err(LedgerBenchError::Answer { target: path.into(), got: format!("{trailers:?}") });
        }
        Ok(bytes.slice(PREFIX.min(bytes.len())..))
    }
}

fn framed(message: &[u8]) -> Bytes {
    let mut frame = BytesMut::with_capacity(PREFIX + message.len());
    frame.put_u8(0);
    frame.put_u32(message.len() as u32);
    frame.put_slice(message);
    frame.freeze()
}

async fn collect(body: &mut RecvStream) -> Result<Bytes, h2::Error> {
    let mut all = BytesMut::new();
    while let Some(piece) = body.data().await {
        let piece = piece?;
        body.flow_control().release_capacity(piece.len())?;
        all.extend_from_slice(&piece);
    }
    Ok(all.freeze())
}

/// Serves calls until the process ends.
pub(crate) async fn serve<F>(listener: TcpListener, answer: impl Fn(String, Bytes) -> F + Clone + Send + 'static)
where
    F: Future<Output = Result<Bytes, LedgerBenchError>> + Send + 'static,
{
    while let Ok((socket, _)) = listener.accept().await {
        let answer = answer.clone();
        if socket.set_nodelay(true).is_err() {
            continue;
        }
        tokio::spawn(async move {
            // A broken connection is reported by the client.
            drop(connection(socket, answer).await);
        });
    }
}

async fn connection<F>(
    socket: TcpStream,
    answer: impl Fn(String, Bytes) -> F + Clone + Send + 'static,
) -> Result<(), h2::Error>
where
    F: Future<Output = Result<Bytes, LedgerBenchError>> + Send + 'static,
{
    let mut connection = server::Builder::new().max_concurrent_streams(1_024).handshake::<_, Bytes>(socket).await?;
    while let Some(accepted) = connection.accept().await {
        let (request, mut respond) = accepted?;
        let answer = answer.clone();
        tokio::spawn(async move {
            let (head, mut body) = request.into_parts();
            let Ok(message) = collect(&mut body).await else { return };
            let answered = answer(head.uri.path().to_owned(), message.slice(PREFIX.min(message.len())..)).await;
            let response = Response::builder().header("content-type", "application/grpc").body(()).expect("a response");
            let (bytes, status) = match answered {
                Ok(bytes) => (bytes, "0"),
                Err(_) => (Bytes::new(), "13"),
            };
            let mut trailers = HeaderMap::new();
            trailers.insert("grpc-status", HeaderValue::from_static(status));
            if let Ok(mut stream) = respond.send_response(response, false) {
                drop(stream.send_data(framed(&bytes), false).and_then(|()| stream.send_trailers(trailers)));
            }
        });
    }
    Ok(())
}

/// Encodes a protobuf message with these byte fields.
pub(crate) fn message(fields: &[(u8, &[u8])]) -> Vec<u8> {
    let mut message = Vec::new();
    for (field, bytes) in fields {
        message.push(field << 3 | 2);
        message.push(u8::try_from(bytes.len()).expect("short fields only"));
        message.extend_from_slice(bytes);
    }
    message
}

/// Value of a protobuf field: a number or bytes.
pub(crate) enum ProtobufField<'a> {
    Number(u64),
    Bytes(&'a [u8]),
}

/// Returns the field with this number.
pub(crate) fn field(mut message: &[u8], wanted: u64) -> Option<ProtobufField<'_>> {
    while !message.is_empty() {
        let tag = varint(&mut message)?;
        let found = match tag & 7 {
            0 => ProtobufField::Number(varint(&mut message)?),
            2 => {
                let length = usize::try_from(varint(&mut message)?).ok()?;
                let (bytes, rest) = message.split_at_checked(length)?;
                message = rest;
                ProtobufField::Bytes(bytes)
            }
            _ => return None,
        };
        if tag >> 3 == wanted {
            return Some(found);
        }
    }
    None
}

fn varint(message: &mut &[u8]) -> Option<u64> {
    let mut value = 0;
    for shift in (0..64).step_by(7) {
        let (byte, rest) = message.split_first()?;
        *message = rest;
        value |= u64::from(byte & 127) << shift;
        if byte & 128 == 0 {
            return Some(value);
        }
    }
    None
}
