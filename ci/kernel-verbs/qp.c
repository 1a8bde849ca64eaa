// SPDX-License-Identifier: GPL-2.0 OR Apache-2.0 OR BSD-3-Clause
/* Queue pairs and shared receive queues: states, draining, events. */
#include <linux/delay.h>

#include "kernel-verbs.h"

TEST(qp_query)
{
	struct pair p = PAIR();
	struct ib_qp_attr attr = {};
	struct ib_qp_init_attr init = {};

	OK(ib_query_qp(p.a.qp, &attr, IB_QP_STATE | IB_QP_CAP | IB_QP_DEST_QPN, &init));
	EQ(attr.qp_state, IB_QPS_RTS);
	EQ(attr.dest_qp_num, p.b.qp->qp_num);
	EQ(attr.path_mtu, IB_MTU_1024);
	EQ(attr.max_rd_atomic, 8);
	EQ(attr.max_dest_rd_atomic, 8);
	EQ(attr.retry_cnt, 7);
	EQ(attr.timeout, 14);
	EQ(attr.qp_access_flags, ALL_ACCESS);
	CHECK(init.cap.max_send_wr >= 64 && init.cap.max_recv_wr >= 64);
	CHECK(init.cap.max_send_sge >= 4 && init.cap.max_recv_sge >= 4);
	CHECK(init.send_cq == p.a.send_cq && init.recv_cq == p.a.recv_cq);
}

static void refused(struct ib_qp_init_attr *init)
{
	struct ib_pd *pd = make_pd(0);
	struct ib_qp *qp;

	init->send_cq = make_cq(64, IB_POLL_DIRECT);
	init->recv_cq = init->send_cq;
	init->qp_type = IB_QPT_RC;
	qp = ib_create_qp(pd, init);
	if (!IS_ERR(qp)) {
		ib_destroy_qp(qp);
		fail("such a queue pair was made");
	}
}

TEST(qp_too_many_send_wr)
{
	refused(&(struct ib_qp_init_attr){
		.cap = { .max_send_wr = device->attrs.max_qp_wr + 1, .max_recv_wr = 1, .max_send_sge = 1, .max_recv_sge = 1 } });
}

TEST(qp_too_many_recv_wr)
{
	refused(&(struct ib_qp_init_attr){
		.cap = { .max_send_wr = 1, .max_recv_wr = device->attrs.max_qp_wr + 1, .max_send_sge = 1, .max_recv_sge = 1 } });
}

TEST(qp_too_many_sges)
{
	refused(&(struct ib_qp_init_attr){
		.cap = { .max_send_wr = 1, .max_recv_wr = 1, .max_send_sge = device->attrs.max_send_sge + 1,
			 .max_recv_sge = 1 } });
}

TEST(qp_bad_transitions)
{
	struct options options = {};
	struct ib_qp_attr attr = { .qp_state = IB_QPS_RTS };
	struct end end = {};

	make_end(&end, &options, false);
	EQ(ib_modify_qp(end.qp, &attr, IB_QP_STATE), -EINVAL);
	to_init(&end, &options);
	EQ(ib_modify_qp(end.qp, &attr, IB_QP_STATE), -EINVAL);
	attr.qp_state = IB_QPS_RTR;
	/* Attributes that it needs are missing. */
	EQ(ib_modify_qp(end.qp, &attr, IB_QP_STATE), -EINVAL);
	EQ(state_of(&end), IB_QPS_INIT);
}

/* Work requests that a queue pair cannot take yet. */
TEST(qp_post_before_ready)
{
	struct options options = {};
	struct end end = {};
	struct receive *receive;
	const struct ib_recv_wr *bad;

	make_end(&end, &options, false);
	receive = make_receive(end.recv_cq);
	CHECK(ib_post_recv(end.qp, &receive->wr, &bad));
	CHECK(try_post(&end, make_request(&end, IB_WR_SEND)));
	to_init(&end, &options);
	post_receive(&end, receive);
	CHECK(try_post(&end, make_request(&end, IB_WR_SEND)));
}

/* Receives that are posted before the connection is complete are used after it. */
TEST(qp_receives_posted_in_init)
{
	struct options options = {};
	struct buffer *to = make_buffer(64), *from = make_buffer(64);
	struct receive *receive;
	struct request *request;
	struct pair p = {};

	make_end(&p.a, &options, false);
	make_end(&p.b, &options, false);
	to_init(&p.a, &options);
	to_init(&p.b, &options);
	receive = receive_into(&p.b, to, 64);
	to_rtr(&p.a, &p.b, &options);
	to_rtr(&p.b, &p.a, &options);
	to_rts(&p.a, &options);
	fill(from->data, 64, 3);
	request = make_request(&p.a, IB_WR_SEND);
	with_buffer(&p.a, request, from, 0, 64);
	run(&p.a, request, IB_WC_SUCCESS);
	expect_ok(&receive->op, IB_WC_RECV);
	CHECK(filled(to->data, 64, 3));
}

/* In the error state everything that is posted comes back, in order. */
TEST(qp_flush)
{
	struct pair p = PAIR();
	struct receive *receives[16];
	struct request *request;
	int i;

	for (i = 0; i < 16; i++)
		receives[i] = receive_into(&p.b, NULL, 0);
	to_state(&p.b, IB_QPS_ERR);
	for (i = 0; i < 16; i++) {
		expect(&receives[i]->op, IB_WC_WR_FLUSH_ERR);
		CHECK(!i || receives[i - 1]->op.order < receives[i]->op.order);
	}
	request = make_request(&p.b, IB_WR_SEND);
	run(&p.b, request, IB_WC_WR_FLUSH_ERR);
	CHECK(request->op.wc.qp == p.b.qp);
}

/* Draining returns when everything has completed. */
static void drained(enum ib_poll_context context, void (*drain)(struct ib_qp *qp), bool sends, bool receives_too)
{
	/* Nobody receives: sends wait, without limit. */
	struct pair p = PAIR(.polled = true, .context = context);
	struct request *requests[16];
	struct receive *receives[16];
	int i;

	for (i = 0; i < 16; i++)
		receives[i] = receive_into(&p.a, NULL, 0);
	for (i = 0; i < 16; i++) {
		requests[i] = make_request(&p.a, IB_WR_SEND);
		requests[i]->wr.send_flags = i % 2 ? IB_SEND_SIGNALED : 0;
		post(&p.a, requests[i]);
	}
	drain(p.a.qp);
	for (i = 0; i < 16; i++) {
		/* What is unsignaled completes, too, if it is flushed. */
		CHECK(!sends || completion_done(&requests[i]->op.done));
		CHECK(!receives_too || completion_done(&receives[i]->op.done));
		if (sends)
			CHECK(requests[i]->op.wc.status != IB_WC_SUCCESS);
		if (receives_too)
			EQ(receives[i]->op.wc.status, IB_WC_WR_FLUSH_ERR);
	}
	EQ(state_of(&p.a), IB_QPS_ERR);
}

TEST(qp_drain_direct)
{
	drained(IB_POLL_DIRECT, ib_drain_qp, true, true);
}

TEST(qp_drain_softirq)
{
	drained(IB_POLL_SOFTIRQ, ib_drain_qp, true, true);
}

TEST(qp_drain_workqueue)
{
	drained(IB_POLL_WORKQUEUE, ib_drain_qp, true, true);
}

TEST(qp_drain_sq)
{
	drained(IB_POLL_WORKQUEUE, ib_drain_sq, true, false);
}

TEST(qp_drain_rq)
{
	drained(IB_POLL_WORKQUEUE, ib_drain_rq, false, true);
}

/* Draining one that has nothing to drain, and one that is in the error state already. */
TEST(qp_drain_idle)
{
	struct pair p = PAIR(.polled = true, .context = IB_POLL_SOFTIRQ);

	ib_drain_qp(p.a.qp);
	to_state(&p.b, IB_QPS_ERR);
	ib_drain_qp(p.b.qp);
}

TEST(qp_drain_with_srq)
{
	struct ib_pd *pd = make_pd(0);
	struct ib_srq *srq = make_srq(pd, 64, 1, NULL, NULL);
	struct pair p = PAIR(.polled = true, .context = IB_POLL_SOFTIRQ, .srq = srq, .srq_pd = pd);
	struct receive *receive = receive_into(&p.b, NULL, 0);
	struct request *request = make_request(&p.b, IB_WR_SEND);

	post(&p.b, request);
	ib_drain_qp(p.b.qp);
	CHECK(completion_done(&request->op.done));
	CHECK(!completion_done(&receive->op.done));
}

/* Traffic, until it is drained in the middle of it. */
TEST(qp_drain_under_traffic)
{
	int round, i;

	for (round = 0; round < 8; round++) {
		struct pair p = PAIR(.polled = true, .context = IB_POLL_SOFTIRQ, .entries = 64);
		struct buffer *from = make_buffer(65536), *to = make_buffer(65536);
		struct request *requests[48];
		struct receive *receives[48];

		for (i = 0; i < 48; i++)
			receives[i] = receive_into(&p.b, to, 65536);
		for (i = 0; i < 48; i++) {
			requests[i] = make_request(&p.a, IB_WR_SEND);
			with_buffer(&p.a, requests[i], from, 0, 65536);
			post(&p.a, requests[i]);
		}
		if (round % 2)
			completes(&requests[round]->op, 5000);
		ib_drain_qp(p.b.qp);
		ib_drain_qp(p.a.qp);
		for (i = 0; i < 48; i++) {
			CHECK(completion_done(&requests[i]->op.done));
			CHECK(completion_done(&receives[i]->op.done));
		}
	}
}

/* Posting more than there is room for fails, and what came before it is done. */
TEST(qp_full_send_queue)
{
	struct pair p = PAIR(.entries = 16);
	struct ib_qp_attr attr = {};
	struct ib_qp_init_attr init = {};
	struct request *first = NULL, *request;
	unsigned int posted = 0;
	int ret, i;

	OK(ib_query_qp(p.a.qp, &attr, IB_QP_CAP, &init));
	do {
		request = make_request(&p.a, IB_WR_SEND);
		first = first ?: request;
		ret = try_post(&p.a, request);
		posted += !ret;
	} while (!ret && posted <= 8192);
	EQ(ret, -ENOMEM);
	CHECK(posted >= 16);
	CHECK(posted >= init.cap.max_send_wr);
	receive_into(&p.b, NULL, 0);
	expect_ok(&first->op, IB_WC_SEND);
	for (i = 0; i < 1000 && try_post(&p.a, request); i++)
		msleep(1);
	CHECK(i < 1000);
}

TEST(qp_full_receive_queue)
{
	struct pair p = PAIR(.entries = 16);
	struct receive *receive = make_receive(p.b.recv_cq);
	const struct ib_recv_wr *bad = NULL;
	unsigned int posted = 0;
	int ret;

	do {
		ret = ib_post_recv(p.b.qp, &receive->wr, &bad);
		posted += !ret;
	} while (!ret && posted <= 8192);
	EQ(ret, -ENOMEM);
	CHECK(bad == &receive->wr);
	CHECK(posted >= 16);
}

/* A list of work requests is posted up to the first that is bad. */
TEST(qp_post_list_up_to_bad)
{
	struct pair p = PAIR();
	struct request *requests[4];
	struct receive *receives[4];
	const struct ib_send_wr *bad = NULL;
	int i;

	for (i = 0; i < 4; i++) {
		receives[i] = receive_into(&p.b, NULL, 0);
		requests[i] = make_request(&p.a, IB_WR_SEND);
		if (i)
			requests[i - 1]->wr.next = &requests[i]->wr;
	}
	requests[2]->wr.opcode = 0xee;
	CHECK(ib_post_send(p.a.qp, &requests[0]->wr, &bad));
	CHECK(bad == &requests[2]->wr);
	expect_ok(&requests[0]->op, IB_WC_SEND);
	expect_ok(&requests[1]->op, IB_WC_SEND);
	expect_ok(&receives[1]->op, IB_WC_RECV);
	CHECK(!completes(&receives[2]->op, 50));
}

TEST(qp_signal_all)
{
	struct pair p = PAIR(.signal_all = true);
	struct request *request = make_request(&p.a, IB_WR_SEND);

	receive_into(&p.b, NULL, 0);
	request->wr.send_flags = 0;
	post(&p.a, request);
	expect_ok(&request->op, IB_WC_SEND);
}

/* Without the flag there is no completion, and the entries come free with the next that has it. */
TEST(qp_selective_signaling)
{
	struct pair p = PAIR(.entries = 16);
	int round, i;

	for (round = 0; round < 40; round++) {
		struct request *requests[8];

		for (i = 0; i < 8; i++) {
			receive_into(&p.b, NULL, 0);
			requests[i] = make_request(&p.a, IB_WR_SEND);
			requests[i]->wr.send_flags = i == 7 ? IB_SEND_SIGNALED : 0;
			post(&p.a, requests[i]);
		}
		expect_ok(&requests[7]->op, IB_WC_SEND);
		ib_process_cq_direct(p.b.recv_cq, -1);
		for (i = 0; i < 7; i++)
			CHECK(!completed(&requests[i]->op));
	}
}

/* Back to RESET, a queue pair forgets what was posted, and can be connected anew. */
TEST(qp_reset_and_reconnect)
{
	struct options options = {};
	struct pair p = connected(&options);
	int round;

	for (round = 0; round < 4; round++) {
		struct receive *forgotten = receive_into(&p.b, NULL, 0), *receive;
		struct request *request = make_request(&p.a, IB_WR_SEND);

		to_state(&p.a, IB_QPS_RESET);
		to_state(&p.b, IB_QPS_RESET);
		to_init(&p.a, &options);
		to_init(&p.b, &options);
		to_rtr(&p.a, &p.b, &options);
		to_rtr(&p.b, &p.a, &options);
		to_rts(&p.a, &options);
		to_rts(&p.b, &options);
		receive = receive_into(&p.b, NULL, 0);
		run(&p.a, request, IB_WC_SUCCESS);
		expect_ok(&receive->op, IB_WC_RECV);
		CHECK(!completed(&forgotten->op));
	}
}

/* A queue pair that is gone leaves no completions. */
TEST(qp_destroy_with_work)
{
	struct pair p = PAIR();
	struct receive *receive = receive_into(&p.b, NULL, 0);
	struct request *request = make_request(&p.a, IB_WR_SEND);

	post(&p.a, request);
	post(&p.a, make_request(&p.a, IB_WR_SEND));
	expect_ok(&receive->op, IB_WC_RECV);
	destroy_qp(&p.a);
	destroy_qp(&p.b);
}

/* Events of a queue pair. */

struct seen {
	struct completion done;
	enum ib_event_type type;
	struct ib_qp *qp;
};

static void saw(struct ib_event *event, void *context)
{
	struct seen *seen = context;

	seen->type = event->event;
	seen->qp = event->element.qp;
	complete(&seen->done);
}

static bool happens(struct seen *seen, enum ib_event_type type)
{
	int i;

	for (i = 0; i < 4; i++) {
		if (!wait_for_completion_timeout(&seen->done, msecs_to_jiffies(5000)))
			return false;
		if (seen->type == type)
			return true;
	}
	return false;
}

/* The one that was asked for what it does not grant is told of it. */
TEST(event_qp_access_err)
{
	struct seen *seen = memory(sizeof(*seen));
	struct buffer *from = make_buffer(64);
	struct pair p;

	init_completion(&seen->done);
	p = PAIR(.event = saw, .context_of_event = seen);
	run(&p.a, make_rdma(&p.a, IB_WR_RDMA_WRITE, from, 64, from->addr, 0x12345678), IB_WC_REM_ACCESS_ERR);
	CHECK(happens(seen, IB_EVENT_QP_ACCESS_ERR));
	CHECK(seen->qp == p.b.qp);
	expect_state(&p.a, IB_QPS_ERR);
	expect_state(&p.b, IB_QPS_ERR);
}

TEST(event_srq_limit)
{
	struct seen *seen = memory(sizeof(*seen));
	struct ib_srq_attr attr = { .srq_limit = 4 };
	struct ib_pd *pd = make_pd(0);
	struct ib_srq *srq;
	struct pair p;
	int i;

	init_completion(&seen->done);
	srq = make_srq(pd, 64, 1, saw, seen);
	p = PAIR(.srq = srq, .srq_pd = pd);
	for (i = 0; i < 8; i++)
		receive_into(&p.b, NULL, 0);
	OK(ib_modify_srq(srq, &attr, IB_SRQ_LIMIT));
	for (i = 0; i < 4; i++)
		run(&p.a, make_request(&p.a, IB_WR_SEND), IB_WC_SUCCESS);
	CHECK(!wait_for_completion_timeout(&seen->done, msecs_to_jiffies(50)));
	run(&p.a, make_request(&p.a, IB_WR_SEND), IB_WC_SUCCESS);
	CHECK(happens(seen, IB_EVENT_SRQ_LIMIT_REACHED));
}

/* A queue pair on an SRQ that is in the error state says when it holds no receive any longer. */
TEST(event_last_wqe_reached)
{
	struct seen *seen = memory(sizeof(*seen));
	struct ib_pd *pd = make_pd(0);
	struct ib_srq *srq = make_srq(pd, 64, 1, NULL, NULL);
	struct pair p;

	init_completion(&seen->done);
	p = PAIR(.srq = srq, .srq_pd = pd, .event = saw, .context_of_event = seen);
	receive_into(&p.b, NULL, 0);
	to_state(&p.b, IB_QPS_ERR);
	CHECK(happens(seen, IB_EVENT_QP_LAST_WQE_REACHED));
	CHECK(seen->qp == p.b.qp);
}

/* Shared receive queues. */

TEST(srq_shared_by_two)
{
	struct ib_pd *pd = make_pd(0);
	struct ib_srq *srq = make_srq(pd, 64, 2, NULL, NULL);
	struct pair p = PAIR(.srq = srq, .srq_pd = pd), q = PAIR(.srq = srq, .srq_pd = pd);
	struct buffer *from = make_buffer(64), *to = make_buffer(4096);
	int i;

	fill(from->data, 64, 7);
	for (i = 0; i < 32; i++) {
		struct pair *one = i % 3 ? &p : &q;
		struct receive *receive = make_receive(one->b.recv_cq);
		struct request *request = make_request(&one->a, IB_WR_SEND);

		receive_sge(receive, to->addr + 64 * i, 40, pd->local_dma_lkey);
		receive_sge(receive, to->addr + 64 * i + 40, 24, pd->local_dma_lkey);
		post_receive(&one->b, receive);
		with_buffer(&one->a, request, from, 0, 64);
		run(&one->a, request, IB_WC_SUCCESS);
		expect_ok(&receive->op, IB_WC_RECV);
		CHECK(receive->op.wc.qp == one->b.qp);
		CHECK(filled(to->data + 64 * i, 64, 7));
	}
}

TEST(srq_query_and_modify)
{
	struct ib_pd *pd = make_pd(0);
	struct ib_srq *srq = make_srq(pd, 64, 2, NULL, NULL);
	struct ib_srq_attr attr = { .srq_limit = 16 };

	OK(ib_modify_srq(srq, &attr, IB_SRQ_LIMIT));
	memset(&attr, 0, sizeof(attr));
	OK(ib_query_srq(srq, &attr));
	CHECK(attr.max_wr >= 64 && attr.max_sge >= 2);
	EQ(attr.srq_limit, 16);
	attr.srq_limit = device->attrs.max_srq_wr + 1;
	CHECK(ib_modify_srq(srq, &attr, IB_SRQ_LIMIT));
}

TEST(srq_full)
{
	struct ib_pd *pd = make_pd(0);
	struct ib_srq *srq = make_srq(pd, 16, 1, NULL, NULL);
	struct receive *receive = make_receive(make_cq(64, IB_POLL_DIRECT));
	const struct ib_recv_wr *bad = NULL;
	unsigned int posted = 0;
	int ret;

	do {
		ret = ib_post_srq_recv(srq, &receive->wr, &bad);
		posted += !ret;
	} while (!ret && posted <= 8192);
	EQ(ret, -ENOMEM);
	CHECK(bad == &receive->wr);
	CHECK(posted >= 16);
}

TEST(srq_bad_parameters)
{
	struct ib_srq_init_attr init = { .attr = { .max_wr = device->attrs.max_srq_wr + 1, .max_sge = 1 } };
	struct ib_pd *pd = make_pd(0);
	struct ib_srq *srq = ib_create_srq(pd, &init);

	if (!IS_ERR(srq)) {
		ib_destroy_srq(srq);
		fail("a queue larger than the largest");
	}
}

/*
 * XRC. A work request of the kernel cannot name an SRQ (struct ib_send_wr has no place for it):
 * what there is are domains, their SRQs and both kinds of queue pairs.
 */

static void undo_xrcd(void *what)
{
	ib_dealloc_xrcd_user(what, NULL);
}

static struct ib_xrcd *make_xrcd(void)
{
	struct ib_xrcd *xrcd;

	need_cap(IB_DEVICE_XRC, "XRC");
	xrcd = ib_alloc_xrcd_user(device, NULL, NULL);
	if (IS_ERR(xrcd))
		fail("ib_alloc_xrcd_user: %ld", PTR_ERR(xrcd));
	defer(UNDO_LAST, undo_xrcd, xrcd);
	return xrcd;
}

static void undo_xrc(void *what)
{
	ib_destroy_srq(what);
}

static struct ib_srq *make_xrc_srq(struct ib_pd *pd, struct ib_xrcd *xrcd)
{
	struct ib_cq *cq = make_cq(64, IB_POLL_DIRECT);
	struct ib_srq_init_attr init = {
		.attr = { .max_wr = 16, .max_sge = 1 },
		.srq_type = IB_SRQT_XRC,
		.ext = { .cq = cq, .xrc = { .xrcd = xrcd } },
	};
	struct ib_srq *srq = ib_create_srq(pd, &init);

	if (IS_ERR(srq))
		fail("ib_create_srq: %ld", PTR_ERR(srq));
	defer(UNDO_CQ, undo_xrc, srq);
	return srq;
}

static void undo_target(void *what)
{
	ib_destroy_qp(what);
}

/* The core wants a domain from users in the kernel, to know the device; the target is not of it. */
static void make_target(struct end *end, struct ib_xrcd *xrcd)
{
	struct ib_qp_init_attr init = { .xrcd = xrcd, .qp_type = IB_QPT_XRC_TGT };

	end->qp = ib_create_qp(make_pd(0), &init);
	if (IS_ERR(end->qp))
		fail("ib_create_qp: %ld", PTR_ERR(end->qp));
	defer(UNDO_QP, undo_target, end->qp);
}

TEST(xrc_srq)
{
	struct ib_xrcd *xrcd = make_xrcd();
	struct ib_pd *pd = make_pd(0);
	struct ib_srq *srq = make_xrc_srq(pd, xrcd);
	struct receive *receive = make_receive(srq->ext.cq);
	const struct ib_recv_wr *bad;

	EQ(srq->srq_type, IB_SRQT_XRC);
	CHECK(srq->ext.xrc.xrcd == xrcd);
	OK(ib_post_srq_recv(srq, &receive->wr, &bad));
}

TEST(xrc_queue_pairs)
{
	struct options initiator = { .type = IB_QPT_XRC_INI }, target = { .type = IB_QPT_XRC_TGT };
	struct ib_xrcd *xrcd = make_xrcd();
	struct pair p = {};

	make_end(&p.a, &initiator, false);
	make_target(&p.b, xrcd);
	to_init(&p.a, &initiator);
	to_init(&p.b, &target);
	to_rtr(&p.a, &p.b, &initiator);
	to_rtr(&p.b, &p.a, &target);
	to_rts(&p.a, &initiator);
	EQ(state_of(&p.a), IB_QPS_RTS);
	EQ(state_of(&p.b), IB_QPS_RTR);
	ib_drain_sq(p.a.qp);
	EQ(state_of(&p.a), IB_QPS_ERR);
}

/* A message to no SRQ is refused by the target. */
TEST(xrc_message_to_no_srq)
{
	struct options initiator = { .type = IB_QPT_XRC_INI }, target = { .type = IB_QPT_XRC_TGT };
	struct ib_xrcd *xrcd = make_xrcd();
	struct pair p = {};

	make_end(&p.a, &initiator, false);
	make_target(&p.b, xrcd);
	to_init(&p.a, &initiator);
	to_init(&p.b, &target);
	to_rtr(&p.a, &p.b, &initiator);
	to_rtr(&p.b, &p.a, &target);
	to_rts(&p.a, &initiator);
	to_rts(&p.b, &target);
	run(&p.a, make_request(&p.a, IB_WR_SEND), IB_WC_REM_INV_REQ_ERR);
	expect_state(&p.b, IB_QPS_ERR);
}

const struct test qp_tests[] = {
	ENTRY(qp_query),
	ENTRY(qp_too_many_send_wr),
	ENTRY(qp_too_many_recv_wr),
	ENTRY(qp_too_many_sges),
	ENTRY(qp_bad_transitions),
	ENTRY(qp_post_before_ready),
	ENTRY(qp_receives_posted_in_init),
	ENTRY(qp_flush),
	ENTRY(qp_drain_direct),
	ENTRY(qp_drain_softirq),
	ENTRY(qp_drain_workqueue),
	ENTRY(qp_drain_sq),
	ENTRY(qp_drain_rq),
	ENTRY(qp_drain_idle),
	ENTRY(qp_drain_with_srq),
	ENTRY(qp_drain_under_traffic),
	ENTRY(qp_full_send_queue),
	ENTRY(qp_full_receive_queue),
	ENTRY(qp_post_list_up_to_bad),
	ENTRY(qp_signal_all),
	ENTRY(qp_selective_signaling),
	ENTRY(qp_reset_and_reconnect),
	ENTRY(qp_destroy_with_work),
	ENTRY(event_qp_access_err),
	ENTRY(event_srq_limit),
	ENTRY(event_last_wqe_reached),
	ENTRY(srq_shared_by_two),
	ENTRY(srq_query_and_modify),
	ENTRY(srq_full),
	ENTRY(srq_bad_parameters),
	ENTRY(xrc_srq),
	ENTRY(xrc_queue_pairs),
	ENTRY(xrc_message_to_no_srq),
	{},
};
