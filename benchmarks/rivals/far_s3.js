// An S3 server in memory that costs little, so that what is measured is the distance: node far_s3.js PORT DELAY_MS
// Path-style, no signatures, no conditions, as much of S3 as the object tier asks for. ETags are no digests.
const http = require("http");
const [port, delay] = process.argv.slice(2).map(Number);
const objects = new Map(); // "/bucket/key" -> {data, etag, at}
let names = []; // sorted, and made anew when a name came or went
let stale = false, count = 0;
const xml = (text) => `<?xml version="1.0" encoding="UTF-8"?>${text}`;

function list(url) {
  if (stale) [names, stale] = [[...objects.keys()].sort(), false];
  const root = url.pathname.replace(/\/$/, "") + "/";
  const prefix = root + (url.searchParams.get("prefix") || "");
  const after = url.searchParams.get("continuation-token") || url.searchParams.get("start-after");
  const most = Number(url.searchParams.get("max-keys") || 1000);
  const found = names.filter((name) => name.startsWith(prefix) && (!after || name > root + after)).slice(0, most + 1);
  const more = found.length > most;
  const entries = found.slice(0, most).map((name) => {
    const { data, etag, at } = objects.get(name);
    return `<Contents><Key>${name.slice(root.length)}</Key><LastModified>${at}</LastModified><ETag>"${etag}"</ETag>` +
      `<Size>${data.length}</Size><StorageClass>STANDARD</StorageClass></Contents>`;
  });
  const next = more ? `<NextContinuationToken>${found[most - 1].slice(root.length)}</NextContinuationToken>` : "";
  return xml(`<ListBucketResult><KeyCount>${entries.length}</KeyCount><IsTruncated>${more}</IsTruncated>${next}` +
    `${entries.join("")}</ListBucketResult>`);
}

function serve(request, response) {
  const url = new URL(request.url, "http://localhost");
  const name = decodeURIComponent(url.pathname);
  const pieces = [];
  request.on("data", (piece) => pieces.push(piece));
  // The body is taken as it comes, as a server far away would take it; the answer is late.
  request.on("end", () => setTimeout(() => {
    const body = pieces.length === 1 ? pieces[0] : Buffer.concat(pieces);
    const object = objects.get(name);
    if (request.method === "PUT") {
      stale = stale || !object;
      const etag = `${++count}-x`;
      objects.set(name, { data: body, etag, at: new Date().toISOString() });
      response.writeHead(200, { ETag: `"${etag}"` }).end();
    } else if (request.method === "GET" && url.searchParams.has("list-type")) {
      response.writeHead(200, { "Content-Type": "application/xml" }).end(list(url));
    } else if (request.method === "POST" && url.searchParams.has("delete")) {
      const gone = [...body.toString().matchAll(/<Key>(.*?)<\/Key>/g)].map((found) => found[1]);
      for (const key of gone) objects.delete(`${name.replace(/\/$/, "")}/${key}`);
      stale = true;
      const deleted = gone.map((key) => `<Deleted><Key>${key}</Key></Deleted>`).join("");
      response.writeHead(200, { "Content-Type": "application/xml" }).end(xml(`<DeleteResult>${deleted}</DeleteResult>`));
    } else if (!object) {
      response.writeHead(404, { "Content-Type": "application/xml" });
      response.end(request.method === "HEAD" ? undefined : xml("<Error><Code>NoSuchKey</Code></Error>"));
    } else {
      const range = /bytes=(\d+)-(\d+)/.exec(request.headers.range || "");
      const whole = object.data.length;
      const facts = { ETag: `"${object.etag}"`, "Last-Modified": new Date(object.at).toUTCString() };
      let data = object.data;
      if (range) {
        const end = Math.min(Number(range[2]), whole - 1);
        data = data.subarray(Number(range[1]), end + 1);
        facts["Content-Range"] = `bytes ${range[1]}-${end}/${whole}`;
      }
      response.writeHead(range ? 206 : 200, { ...facts, "Content-Length": data.length });
      response.end(request.method === "HEAD" ? undefined : data);
    }
  }, delay));
}

http.createServer({ keepAliveTimeout: 60000 }, serve).listen(port, "127.0.0.1");
