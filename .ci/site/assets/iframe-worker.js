// Browsers start no Worker from a page that was opened from the disk. There the search's code runs in a hidden frame
// that takes the Worker's place; material's own stand-in for this would come from a CDN. Elsewhere: nothing.
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(url) {
      super();
      const frame = document.createElement("iframe");
      frame.hidden = true;
      document.body.append(frame);
      const inner = frame.contentWindow;
      this.waiting = [];
      inner.document.open();
      inner.document.write("<!doctype html><body>");
      inner.document.close();
      inner.postMessage = data => this.dispatchEvent(new MessageEvent("message", { data }));
      const load = source => new Promise((done, failed) => {
        const script = inner.document.createElement("script");
        script.src = source;
        script.onload = done;
        script.onerror = failed;
        inner.document.body.append(script);
      });
      load(url).then(() => {
        this.inner = inner;
        this.waiting.splice(0).forEach(data => this.postMessage(data));
      });
    }
    postMessage(data) {
      if (!this.inner) this.waiting.push(data);
      else this.inner.dispatchEvent(new this.inner.MessageEvent("message", { data }));
    }
    terminate() {}
  };
}
